"""Map files -> resolved grids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from stable_forgetting.benchmarks.maps.cells import Rule
from stable_forgetting.benchmarks.maps.config import MAPS, MapFile, MapRow
from stable_forgetting.benchmarks.suite.goals import metric_specs
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite, make_audits
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.config import (
    Strict,
    apply_overrides,
    did_you_mean,
    digest,
    merge,
    read_yaml,
    validate,
)
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import NonNegative
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.measure.metric import MapAxes, MetricSpec
from stable_forgetting.common.methods.base import UnlearningMethod, resolve_config
from stable_forgetting.common.methods.forget_retain import lambda_field

if TYPE_CHECKING:
    from stable_forgetting.common.audits.base import Audit


@dataclass(frozen=True)
class GridRow:
    """A row with its axes resolved."""

    label: str
    method: str
    row: MapRow
    lrs: tuple[float, ...]
    lambdas: tuple[float, ...]
    defaults: Mapping[str, Any]
    steps: tuple[int, ...]
    origin: str

    @property
    def cls(self) -> type[UnlearningMethod]:
        """The method's class."""
        return METHODS[self.method]

    def config(self, lr: float, lam: float) -> Any:
        """The method's full config at one point of the grid."""
        point: dict[str, Any] = {"lr": lr, "steps": max(self.steps)}
        if self.row.axis is not None:
            value: Any = lam
            for part in reversed(self.row.axis.split(".")):
                value = {part: value}
            point = merge(point, value)
        params = merge(merge(self.defaults, self.row.params), point)
        return resolve_config(self.method, self.row.preset, params, origin=self.origin)


@dataclass(frozen=True)
class ResolvedMap:
    """A validated map: its spec, the suite of its Original and Retrains, rows, rule, probe."""

    spec: MapFile
    suite: ResolvedSuite
    rows: tuple[GridRow, ...]
    rule: Rule
    probe: Mapping[str, Audit] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The map's name."""
        return self.spec.name

    def metric(self, name: str) -> MetricSpec:
        """What the benchmark declares of one of its metrics."""
        metrics = BENCHMARKS[self.suite.spec.benchmark].metrics
        return next(metric for metric in metrics if metric.name == name)

    @property
    def further(self) -> tuple[MetricSpec, ...]:
        """What probes of the suite make of a cell's metrics beside those of Original."""
        specs = metric_specs(self.suite.spec, self.suite.probes)
        given = dict.fromkeys(specs, 1.0)
        entries = self.suite.probes.values()
        return tuple(specs[name] for entry in entries for name in entry.probe.related(given))

    def axis(self, label: str) -> str | None:
        """The parameter on a row's second axis."""
        return next((row.row.axis for row in self.rows if row.label == label), None)

    def points(self) -> Iterator[tuple[GridRow, float, float]]:
        """(row, lr, lambda) of the grid that every seed runs, without extensions."""
        for row in self.rows:
            for lr, lam in itertools.product(row.lrs, row.lambdas):
                yield row, lr, lam


def map_names() -> list[str]:
    """Built-in maps."""
    return sorted(path.stem for path in MAPS.glob("*.yaml"))


def find_map(name: str) -> Path:
    """A built-in map's file, or a path given as such."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return Path(name)
    path = MAPS / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"unknown map '{name}'{did_you_mean(name, map_names())}")
    return path


def load_map(
    name: str,
    overrides: Sequence[str] = (),
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> ResolvedMap:
    """Reads, overrides and validates a map.

    Args:
        name: Built-in name or path of a YAML file.
        overrides: ``key.sub=value`` strings.
        seeds: Replace the map's seeds.
        only: Keep only these rows.
    """
    path = find_map(name)
    data = apply_overrides(read_yaml(path), overrides)
    if seeds:
        data["seeds"] = list(seeds)
    spec = validate(MapFile, data, str(path))
    spec = _only(spec, only, str(path))
    if overrides or seeds or only:
        varied = {"set": [*overrides], "seeds": [*(seeds or ())], "only": sorted(only)}
        spec = spec.model_copy(update={"name": f"{spec.name}+{digest(varied)[:6]}"})
    rows = tuple(_grid_row(spec, k, row or MapRow(), path) for k, row in spec.map.methods.items())
    _check_defaults(spec, rows, path)
    suite = _references(spec, path)
    _check_applicable(suite, rows)
    rule = make_rule(_axes(suite, path), spec.map.rule, f"{path}: map.rule")
    probe = make_audits(spec.map.probe, f"{path}: map.probe")
    return ResolvedMap(spec, suite, rows, rule, probe)


def _axes(suite: ResolvedSuite, path: Path) -> MapAxes:
    axes = BENCHMARKS[suite.spec.benchmark].map_axes
    if axes is None:
        raise ConfigError(
            f"{path}: benchmark '{suite.spec.benchmark}' declares no map_axes, so there is nothing "
            "to judge a cell by; map another suite"
        )
    return axes


def make_rule(axes: MapAxes, tolerances: Mapping[str, Any], origin: str) -> Rule:
    """The acceptance rule of a map file, with the benchmark's own tolerances where it has none.

    Raises:
        ConfigError: A key is no metric that maps of this benchmark judge, or its value is wrong.
    """
    judged = (axes.forgotten, axes.retained, axes.utility)
    fields: dict[str, Any] = {
        metric: (NonNegative, value) for metric, value in zip(judged, axes.tolerances, strict=True)
    }
    model = create_model("Rule", __base__=Strict, two_sided=(bool, False), **fields)
    values = validate(model, tolerances, origin).model_dump()
    return Rule(axes, {metric: values[metric] for metric in judged}, values["two_sided"])


def _check_applicable(suite: ResolvedSuite, rows: Sequence[GridRow]) -> None:
    benchmark = BENCHMARKS[suite.spec.benchmark]
    scenario = benchmark.scenario_of(suite.protocol)
    for row in rows:
        reason = row.cls.info.inapplicable(scenario=scenario, modality=benchmark.modality)
        if reason is not None:
            raise ConfigError(f"{row.origin}: method '{row.method}' is {reason}; remove the row")


def _only(spec: MapFile, only: Sequence[str], origin: str) -> MapFile:
    if not only:
        return spec
    rows = spec.map.methods
    for label in only:
        if label not in rows:
            raise ConfigError(f"{origin}: no row '{label}'{did_you_mean(label, list(rows))}")
    chosen = {label: row for label, row in rows.items() if label in only}
    compare = tuple(pair for pair in spec.map.compare if set(pair) <= set(chosen))
    grid = spec.map.model_copy(update={"methods": chosen, "compare": compare})
    return spec.model_copy(update={"map": grid})


def _grid_row(spec: MapFile, label: str, row: MapRow, path: Path) -> GridRow:
    method, grid = row.method or label, spec.map
    origin = f"{path}: map.methods.{label}"
    try:
        cls = METHODS[method]
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    for needed in ("lr", "steps", "evaluate_every"):
        if needed not in cls.Config.model_fields:
            raise ConfigError(
                f"{origin}: method '{method}' has no '{needed}', so it has no map; remove the row"
            )
    if row.axis == "lam":
        row = row.model_copy(update={"axis": lambda_field(cls.Config) or row.axis})
    if row.axis is not None and row.axis.partition(".")[0] not in cls.Config.model_fields:
        raise ConfigError(
            f"{origin}: method '{method}' has no '{row.axis}'; give axis: PARAMETER, or axis: null"
        )
    for fixed in ("lr", "steps", row.axis or "lr"):
        if fixed in row.params:
            raise ConfigError(f"{origin}: params.{fixed} is an axis of the map; leave it out")
    lambdas = (row.lambdas or grid.lambdas) if row.axis else (1.0,)
    resolved = GridRow(
        label, method, row, row.lrs or grid.lrs, lambdas, grid.defaults, grid.steps, origin
    )
    for lr, lam in itertools.product(resolved.lrs, resolved.lambdas):
        resolved.config(lr, lam)
    return resolved


def _check_defaults(spec: MapFile, rows: Sequence[GridRow], path: Path) -> None:
    fields = {name for row in rows for name in row.cls.Config.model_fields}
    for key in spec.map.defaults:
        if key not in fields:
            hint = did_you_mean(key, sorted(fields))
            raise ConfigError(f"{path}: map.defaults: no row has '{key}'{hint}")


def _references(spec: MapFile, path: Path) -> ResolvedSuite:
    """The suite's Original and two Retrains, on the map's seeds and protocol."""
    name = spec.suite
    if name.endswith((".yaml", ".yml")):
        name = str(path.parent / name)
    suite = load_suite(name)
    if suite.after:
        raise ConfigError(f"{path}: suite '{spec.suite}' follows another request; map a first one")
    benchmark = BENCHMARKS[suite.spec.benchmark]
    protocol = merge(suite.spec.protocol, spec.protocol)
    typed = validate(benchmark.Config, protocol, f"{path}: protocol")
    changed = {"suite": spec.name, "seeds": spec.seeds, "retrains": 2, "protocol": protocol}
    rows = tuple(row for row in suite.rows if row.method in REFERENCES)
    return replace(suite, spec=suite.spec.model_copy(update=changed), protocol=typed, rows=rows)
