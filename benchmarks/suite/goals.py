"""What a suite's table is judged by: its columns, reference rows, probes and rule sets."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.suite.suite import REFERENCES, Suite
from stable_forgetting.common.base.config import Strict, check_known, read_yaml
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.metric import MetricSpec, Row
from stable_forgetting.common.measure.rules import Rule, RuleSet
from stable_forgetting.common.protocol.probe import Probe, ProbeTable, make_probe


@dataclass(frozen=True)
class SuiteProbe:
    """A probe of a suite."""

    registered: str
    probe: Probe

    def added(self, metrics: Row, made: ProbeTable) -> dict[str, float | None]:
        """A model's metrics with those of its table, and what the probe makes of both."""
        metrics = {**metrics, **self.probe.summary(made)}
        return {**metrics, **self.probe.related(metrics)}


def make_probes(spec: Suite, origin: str) -> dict[str, SuiteProbe]:
    """Name -> probe."""
    modality = BENCHMARKS[spec.benchmark].modality
    probes = {}
    for name, given in spec.probes.items():
        where = f"{origin}: probes.{name}"
        settings = dict(given or {})
        registered = str(settings.pop("probe", name))
        probe = make_probe(registered, settings, where, name=name)
        reason = probe.inapplicable(modality)
        if reason is not None:
            raise ConfigError(f"{where}: '{registered}' is {reason}; leave it out")
        probes[name] = SuiteProbe(registered, probe)
    return probes


def metric_specs(spec: Suite, probes: Mapping[str, SuiteProbe]) -> dict[str, MetricSpec]:
    """Metric -> its description: the benchmark's own, then those of the suite's probes."""
    own: tuple[MetricSpec, ...] = BENCHMARKS[spec.benchmark].metrics
    further = (metric for probe in probes.values() for metric in probe.probe.metrics)
    return {metric.name: metric for metric in (*own, *further)}


def with_columns(
    spec: Suite, protocol: Strict, probes: Mapping[str, SuiteProbe], origin: str
) -> Suite:
    """The suite with the columns of its main table, everything that it names checked.

    Raises:
        ConfigError: An unknown column, rule set or published table; a metric of the benchmark's
            rule that nothing measures; a reference row missing or doubled.
    """
    rule: Rule = BENCHMARKS[spec.benchmark].gap_of(protocol)
    metrics = [*metric_specs(spec, probes)]
    for metric in rule.metrics:
        if metric not in metrics:
            raise ConfigError(
                f"{origin}: nothing measures '{metric}', by which rows are ordered; add its probe "
                f"under probes: {{{metric.partition('.')[0]}: }}"
            )
    if not spec.columns:
        spec = spec.model_copy(update={"columns": rule.columns or rule.metrics})
    check_known(f"{origin}: columns: unknown metric", spec.columns, metrics)
    check_known(f"{origin}: rules: no rule set", spec.rules, [*rule_sets(spec, every=True)])
    check_known(f"{origin}: published: no table", spec.published, list(read_tables()))
    check_known(f"{origin}: figures: no figure", spec.figures, list(read_figures()))
    _check_references(spec, rule, origin)
    return spec


def rule_sets(spec: Suite, *, every: bool = False) -> dict[str, RuleSet]:
    """Name -> rule set: those that the suite names, or every one of its benchmark."""
    sets = {rules.name: rules for rules in BENCHMARKS[spec.benchmark].rule_sets}
    return {name: rules for name, rules in sets.items() if every or name in spec.rules}


def _check_references(spec: Suite, rule: Rule, origin: str) -> None:
    methods: list[Any] = [*spec.method_of.values()]
    needs = rule.needs.union(*(c.goal.needs for r in rule_sets(spec).values() for c in r.criteria))
    for role in REFERENCES:
        count = methods.count(role)
        if role in needs and count != 1:
            every = "every gap is to it" if role == "retrain" else "goals are measured on it"
            raise ConfigError(
                f"{origin}: methods has {count} rows of method {role}; {every}, so there must be "
                "exactly one"
            )
        if count > 1:
            raise ConfigError(f"{origin}: methods has {count} rows of method {role}; keep one")


FOLDER = Path(__file__).parents[1] / "published"
FIGURES = FOLDER / "figures.yaml"
TOLERANCE = 0.03
"""Printed and recomputed AG further apart than rounding of two decimals allows."""


@dataclass(frozen=True)
class PublishedRow:
    """One method of one published table: metric -> (value, std or None)."""

    method: str
    values: dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Printed:
    """One printed number with where it stands.

    Attributes:
        std: As printed; empty without.
    """

    table: str
    dataset: str
    model: str
    split: str
    method: str
    metric: str
    text: str
    std: str

    @property
    def number(self) -> float:
        """Its value."""
        return float(self.text)

    @property
    def half_unit(self) -> float:
        """Half a unit of its last digit."""
        exponent = Decimal(self.text).as_tuple().exponent
        assert isinstance(exponent, int)
        return float(Decimal(1).scaleb(exponent)) / 2


def read_printed() -> list[Printed]:
    """Every printed number of every table."""
    values = []
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                line["text"] = line.pop("value")
                with suppress(ValueError):
                    float(line["text"])
                    values.append(Printed(**line))
    return values


@cache
def read_tables() -> Mapping[str, list[PublishedRow]]:
    """Table label -> rows, in the order of the files, which are read once."""
    tables: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {}
    for line in read_printed():
        std = float(line.std) if line.std else None
        rows = tables.setdefault(line.table, {})
        rows.setdefault(line.method, {})[line.metric] = (line.number, std)
    return {
        label: [PublishedRow(method, values) for method, values in rows.items()]
        for label, rows in tables.items()
    }


def read_figures() -> dict[str, dict[str, str]]:
    """Label of a figure -> its ``title``, and in ``note`` what the suites show in another way."""
    return read_yaml(FIGURES)


def recomputed_gap(row: PublishedRow, reference: PublishedRow) -> float | None:
    """Mean |gap| to the table's own Retrain over its (FA or UA), RA, TA, MIA columns."""
    both = row.values.keys() & reference.values.keys()
    names = [name for name in ("FA", "UA", "RA", "TA", "MIA") if name in both]
    if len(names) != 4:
        return None
    return math.fsum(abs(row.values[n][0] - reference.values[n][0]) for n in names) / 4
