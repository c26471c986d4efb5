"""What a suite's table is judged by: its columns, reference rows, probes and rule sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stable_forgetting.benchmarks.suite.published import read_figures, read_tables
from stable_forgetting.benchmarks.suite.suite import REFERENCES, Suite
from stable_forgetting.common.base.config import Strict, did_you_mean
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.rules import Rule, RuleSet
from stable_forgetting.common.protocol.probe import Probe, make_probe


@dataclass(frozen=True)
class SuiteProbe:
    """A probe of a suite."""

    registered: str
    probe: Probe


def make_probes(spec: Suite, origin: str) -> dict[str, SuiteProbe]:
    """Name -> probe.

    Raises:
        ConfigError: An unknown probe or setting, or one for models of another modality.
    """
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
    _check_names(f"{origin}: columns: unknown metric", spec.columns, metrics)
    _check_names(f"{origin}: rules: no rule set", spec.rules, [*rule_sets(spec, every=True)])
    _check_names(f"{origin}: published: no table", spec.published, list(read_tables()))
    _check_names(f"{origin}: figures: no figure", spec.figures, list(read_figures()))
    _check_references(spec, rule, origin)
    return spec


def rule_sets(spec: Suite, *, every: bool = False) -> dict[str, RuleSet]:
    """Name -> rule set: those that the suite names, or every one of its benchmark."""
    sets = {rules.name: rules for rules in BENCHMARKS[spec.benchmark].rule_sets}
    return {name: rules for name, rules in sets.items() if every or name in spec.rules}


def _check_names(fault: str, names: tuple[str, ...], valid: list[str]) -> None:
    for name in names:
        if name not in valid:
            raise ConfigError(f"{fault} '{name}'{did_you_mean(name, valid)}")


def _check_references(spec: Suite, rule: Rule, origin: str) -> None:
    methods: list[Any] = [(row and row.method) or label for label, row in spec.methods.items()]
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
