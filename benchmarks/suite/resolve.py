"""Suite files -> resolved suites: inheritance, overrides, checked rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stable_forgetting.benchmarks.suite.attacks import NO_RETRAIN, check_tuning, make_audits
from stable_forgetting.benchmarks.suite.defaults import (
    BudgetWord,
    budget_of,
    check_settings,
    row_params,
)
from stable_forgetting.benchmarks.suite.goals import SuiteProbe, make_probes, with_columns
from stable_forgetting.benchmarks.suite.grid import Acceptance, GridRow, acceptance, grid_row
from stable_forgetting.benchmarks.suite.reading import named_after, read_suite, requests_until
from stable_forgetting.benchmarks.suite.suite import REFERENCES, Row, Suite
from stable_forgetting.benchmarks.suite.tune import Draw, Search, search_of
from stable_forgetting.common.audits.base import Audit
from stable_forgetting.common.base.config import Strict, check_known, digest, merge, validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.measure.rules import Rule, TargetRule
from stable_forgetting.common.methods.base import ALIASES, MethodInfo, resolve_config
from stable_forgetting.common.protocol.benchmark import Benchmark
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.rehearsal import Rehearsal


@dataclass(frozen=True)
class ResolvedRow:
    """A row with its full config.

    Attributes:
        config: What it runs with where it is not tuned.
        search: Where its trials come from; None when it is not tuned.
        grid: Its points; None where the suite has no grid.
        draws: The trials that are known before any is run.
        budget: How it stands to the suite's budget.
    """

    label: str
    method: str
    config: Strict
    search: Search | None = None
    draws: tuple[Draw, ...] = ()
    budget: BudgetWord = ""
    grid: GridRow | None = None


@dataclass(frozen=True)
class ResolvedSuite:
    """A validated suite: typed protocol, typed rows.

    Attributes:
        protocol: Of the last fold, where there are folds.
        after: The suite, or the fold, of the request before.
        fold: Its name among the folds; empty without any.
        folds: The folds before the last, each a suite.
        rehearsal: How much of it is done, where it is only rehearsed.
        unfolded: The whole suite's spec, of which ``spec`` is the last fold's.
        accepts: The rule of its grid.
    """

    spec: Suite
    protocol: Strict
    rows: tuple[ResolvedRow, ...]
    after: ResolvedSuite | None = None
    audits: Mapping[str, Audit] = field(default_factory=dict)
    probes: Mapping[str, SuiteProbe] = field(default_factory=dict)
    fold: str = ""
    folds: tuple[ResolvedSuite, ...] = ()
    rehearsal: Rehearsal | None = None
    unfolded: Suite | None = None
    accepts: Acceptance | None = None

    @property
    def name(self) -> str:
        """The suite's name."""
        return self.spec.suite

    @property
    def trial_rule(self) -> Rule | TargetRule:
        """What orders the trials of a row: the table's rule, or one that reads no Retrain."""
        benchmark, tune = BENCHMARKS[self.spec.benchmark], self.spec.tune
        if tune is None or tune.select == "retrain":
            return benchmark.gap_of(self.protocol)
        rule = benchmark.without_retrain(self.protocol)
        assert rule is not None, "load_suite refuses the suite"
        return rule

    @property
    def retrain(self) -> str:
        """Label of the Retrain beside which attacks are read.

        Raises:
            ConfigError: The suite has none.
        """
        for row in self.rows:
            if row.method == "retrain":
                return row.label
        raise ConfigError(f"{self.name}: {NO_RETRAIN}")

    def row(self, label: str) -> ResolvedRow:
        """The row of a label."""
        return next(row for row in self.rows if row.label == label)


def load_suite(
    name: str,
    overrides: Sequence[str] = (),
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    further: Mapping[str, Row | None] = MappingProxyType({}),
) -> ResolvedSuite:
    """Reads, overrides and validates a suite.

    Args:
        name: Built-in name or path of a YAML file.
        overrides: ``key.sub=value`` strings.
        seeds: Replace the suite's seeds.
        only: Keep only these rows (and the references).
        further: Rows that are added where the suite has none of that label.
    """
    path, data = read_suite(name, overrides)
    if seeds:
        data["seeds"] = seeds if isinstance(seeds, int) else [*seeds]  # a number is refused below
    origin = f"{path}, --set {' '.join(overrides)}" if overrides else str(path)
    spec = validate(Suite, data, origin)
    name = BENCHMARKS.entry(spec.benchmark).name
    spec = spec.model_copy(update={"benchmark": name, "methods": {**further, **spec.methods}})
    benchmark = BENCHMARKS[spec.benchmark]
    protocol = validate(benchmark.Config, spec.protocol, f"{origin}: protocol")
    _check_warmup(benchmark, protocol, str(path))
    probes = make_probes(spec, str(path))
    spec = with_columns(spec, protocol, probes, str(path))
    _check_labels(spec, str(path))
    accepts = _accepts(spec, str(path))
    defaults = [*spec.defaults, *(key for of in spec.defaults_of.values() for key in of)]
    check_settings(spec, defaults, f"{path}: defaults")
    if only:
        spec = _only(spec, only, str(path))
    rows = tuple(
        _resolve(spec, label, row or Row(), str(path)) for label, row in spec.methods.items()
    )
    before = _before(spec, path, overrides)
    audits = make_audits(spec, f"{path}: audits")
    check_tuning(spec, f"{path}: tune.after_attack")
    _check_selection(spec, protocol, f"{path}: tune.select")
    resolved = ResolvedSuite(spec, protocol, rows, before, audits, probes, accepts=accepts)
    if overrides or seeds or only:  # it reports under a name of its own, as digits-class+3f2a1b
        own = {"set": [*overrides], "seeds": [*(seeds or ())], "only": sorted(only)}
        name = f"{spec.suite}+{digest(own)[:6]}"
        resolved = replace(resolved, spec=spec.model_copy(update={"suite": name}))
    return _folded(resolved, str(path)) if spec.folds else resolved


def _check_warmup(benchmark: type[Benchmark], protocol: Any, origin: str) -> None:
    """Refuses a warm-up that is longer than the training of Original, as far as sizes are known."""
    train: FitConfig | None = getattr(protocol, "train", None)
    if train is None or not train.warmup_steps or not train.epochs:
        return
    work = benchmark.workload(protocol)
    if work is None:
        return
    steps = math.ceil(sum(work.parts.values()) / train.batch_size) * train.epochs
    if train.warmup_steps >= steps:
        raise ConfigError(
            f"{origin}: protocol.train.warmup_steps: a warm-up of {train.warmup_steps} steps "
            f"leaves nothing of a run of {steps:g}; give fewer warmup_steps or more epochs"
        )


def _folded(suite: ResolvedSuite, origin: str) -> ResolvedSuite:
    """The suite of the last fold, with those before it."""
    assert suite.spec.folds is not None
    folds: list[ResolvedSuite] = []
    for number, over in enumerate(suite.spec.folds.protocols, 1):
        where = f"{origin}: folds.protocols.{number - 1}"
        given = merge(suite.spec.protocol, over)
        protocol = validate(type(suite.protocol), given, where)
        spec = suite.spec.model_copy(update={"protocol": given})
        fold = replace(suite, spec=spec, protocol=protocol, fold=f"fold-{number}")
        if number < len(suite.spec.folds.protocols):
            plain: dict[str, Any] = {"folds": None, "audits": {}, "compare": (), "retrains": 1}
            fold = replace(fold, spec=spec.model_copy(update=plain), audits={})
        if folds and suite.spec.folds.kind == "sustainability":
            fold = replace(fold, after=folds[-1])
        folds.append(fold)
    return replace(folds[-1], folds=tuple(folds[:-1]), unfolded=suite.spec)


def _before(spec: Suite, path: Path, overrides: Sequence[str]) -> ResolvedSuite | None:
    """The suite of the request before; a row that it lacks is run there as it is written here."""
    if spec.after is None:
        return None
    name = named_after(path, spec.after)
    if {spec.suite, str(path.resolve())} & {*requests_until(name)}:
        raise ConfigError(
            f"{path}: after names the suite itself, or a later one; name the request before it"
        )
    others = [text for text in overrides if not text.startswith("after=")]
    before = load_suite(name, others, seeds=spec.seeds, further=spec.methods)
    for tuned in (spec, before.spec):
        if tuned.tune:
            raise ConfigError(
                f"{path}: suite {tuned.suite} is tuned, and requests in sequence take fixed "
                "configs; remove tune and write the chosen params"
            )
    if before.spec.benchmark != spec.benchmark:
        raise ConfigError(f"{path}: after: '{name}' is of another benchmark")
    return before


def _check_selection(spec: Suite, protocol: Any, origin: str) -> None:
    """Refuses to tune without a Retrain where none is read, or where nothing stands for it."""
    benchmark = BENCHMARKS[spec.benchmark]
    if spec.tune is None or spec.tune.select == "retrain":
        return
    if "retrain" not in benchmark.gap_of(protocol).needs:
        raise ConfigError(
            f"{origin}: trials of benchmark '{spec.benchmark}' are ordered by goals, for which no "
            "Retrain is read; leave select out"
        )
    if benchmark.without_retrain(protocol) is None:
        raise ConfigError(
            f"{origin}: benchmark '{spec.benchmark}' names no data of this protocol that stand for "
            "what Retrain never saw; leave select out"
        )


def _only(spec: Suite, only: Sequence[str], origin: str) -> Suite:
    """The suite with these rows and the references alone."""
    check_known(f"{origin}: no row", only, [*spec.methods])
    methods = {
        label: row
        for label, row in spec.methods.items()
        if label in only or spec.method_of[label] in REFERENCES
    }
    compare = tuple(pair for pair in spec.compare if set(pair) <= set(methods))
    update: dict[str, Any] = {"methods": methods, "compare": compare}
    if spec.tune:
        gone = spec.methods.keys() - methods.keys() - {*METHODS}
        kept = {
            part: {k: v for k, v in getattr(spec.tune, part).items() if k not in gone}
            for part in ("grids", "spaces")
        }
        update["tune"] = spec.tune.model_copy(update=kept)
    if spec.grid:
        axes = {label: own for label, own in spec.grid.rows.items() if label in methods}
        update["grid"] = spec.grid.model_copy(update={"rows": axes})
    return spec.model_copy(update=update)


def _resolve(spec: Suite, label: str, row: Row, origin: str) -> ResolvedRow:
    method = row.method or label
    method = method if method in METHODS else ALIASES.get(method, method)
    where = f"{origin}: methods.{label}"
    try:
        cls = METHODS[method]
    except ConfigError as error:
        mend = "if it is a plugin's, name the file under plugins: or with --plugin"
        raise ConfigError(f"{where}: {error}; {mend}") from None
    _check_class(cls, where)
    grid = None
    if spec.grid and method not in REFERENCES:
        grid = grid_row(
            spec.grid, label, method=method, preset=row.preset, params=row.params, file=where
        )
        row = row.model_copy(update={"params": merge(row.params, grid.set(*grid.points[0]))})
    params = row_params(spec, method, row, where)
    if grid is not None:
        grid = replace(grid, params=params)
        configs = [grid.config(*point) for point in grid.points]  # every one is valid
        if getattr(configs[0], "stop_below", None):
            raise ConfigError(
                f"{where}: stop_below ends a run early, and a grid reads every run at grid.steps; "
                "leave it out"
            )
        return ResolvedRow(label, method, configs[0], grid=grid)
    config = resolve_config(method, row.preset, params, origin=f"{where}.params")
    search = None
    if spec.tune and row.tune and cls.info.changes_model and method not in REFERENCES:
        search = search_of(
            spec.tune, label, method=method, preset=row.preset, params=params, file=origin
        )
    draws = search.more((), ()) if search else ()
    budget = budget_of(spec, method, row, config, search.space if search else ())
    return ResolvedRow(label, method, config, search, draws, budget)


def _accepts(spec: Suite, origin: str) -> Acceptance | None:
    """The rule of a suite's grid; None without a grid."""
    if spec.grid is None:
        return None
    axes = BENCHMARKS[spec.benchmark].sweep_axes
    if axes is None:
        raise ConfigError(
            f"{origin}: benchmark '{spec.benchmark}' declares no sweep_axes, which say when a "
            "cell is acceptable; sweep another suite"
        )
    check_known(f"{origin}: grid.rows: no row", spec.grid.rows, [*spec.methods])
    return acceptance(axes, spec.grid.rule, f"{origin}: grid.rule")


def _check_class(cls: Any, where: str) -> None:
    """What a plugin's author may have forgotten."""
    if not isinstance(getattr(cls, "info", None), MethodInfo):
        raise ConfigError(f"{where}: class {cls.__name__} has no info = MethodInfo(...); add it")
    try:
        cls.Config()
    except ValueError as error:
        first = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{where}: {cls.__name__}.Config needs a default for every field ({first})"
        ) from None


def _check_labels(spec: Suite, origin: str) -> None:
    """A grid or a space that no row uses is a misspelling."""
    labels = [*spec.methods, "default"]
    for part in ("grids", "spaces") if spec.tune else ():
        unknown = [label for label in getattr(spec.tune, part) if label not in METHODS]
        check_known(f"{origin}: tune.{part}: no row", unknown, labels)
    default = spec.tune.spaces.get("default", {}) if spec.tune else {}
    keys = [key.partition(".")[0] for key in default]
    check_settings(spec, keys, f"{origin}: tune.spaces.default")
