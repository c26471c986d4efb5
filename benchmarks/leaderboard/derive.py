"""Records -> leaderboard: gaps to the seed-paired Retrain, the noise floor, intervals, ranks.

Nothing here is stored as truth: a table is derived from records each time it is made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.audits.report import audit_tables
from benchmarks.leaderboard.board import BoardRow, Comparison, FinalRecords, Leaderboard, Trial
from benchmarks.pipeline.measuring import read_record, read_scores
from benchmarks.pipeline.planner import make_plan, trial_gap
from benchmarks.pipeline.stage import Plan, Stage
from benchmarks.spec.resolve import ResolvedSuite
from benchmarks.spec.suite import FLOOR
from common.base.config import canonical
from common.base.errors import DataError
from common.base.registry import BENCHMARKS
from common.measure.gaps import (
    Floor,
    Summary,
    average_gap,
    derived,
    gap,
    paired_difference,
    retrain_floor,
    separability,
    summarise,
)
from common.measure.goal import GapRule
from common.protocol.benchmark import Benchmark
from common.store.records import RunRecord
from common.store.stages import StageStore

if TYPE_CHECKING:
    from common.measure.scores import Scores


def make_leaderboard(suite: ResolvedSuite, store: StageStore) -> Leaderboard:
    """Reads the records that are there and derives the table."""
    plan = make_plan(suite, store)
    finals: FinalRecords = {}
    records: list[tuple[str, RunRecord]] = []
    stages: dict[tuple[str, int, int], Stage] = {}
    missing = len(plan.waiting) * len(suite.spec.seeds) + plan.undrawn
    for result in plan.results:
        record = read_record(store, result.stage)
        if record is None:
            missing += 1
            continue
        if result.trial is None:
            records.append((result.label, record))
            stages[result.label, result.replicate, result.seed] = result.stage
            finals.setdefault((result.label, result.replicate), {})[result.seed] = record
    _check_one_data_set(records)
    benchmark = BENCHMARKS[suite.spec.benchmark]
    specs, rule = {spec.name: spec for spec in benchmark.metrics}, benchmark.gap_of(suite.protocol)
    targets = finals.get((_retrain_label(suite), 0), {})
    if benchmark.compare.__func__ is not Benchmark.compare.__func__:  # type: ignore[attr-defined]
        finals = _compared(suite, finals, stages, store)
        targets = finals.get((_retrain_label(suite), 0), {})
    records = [(label, finals[label, r.replicate][r.seed]) for label, r in records]
    floor, floor_row = _floor(finals, targets, suite, rule)
    floors = dict(zip(sorted(targets), floor.per_seed, strict=True)) if targets else {}
    rows = []
    for row in suite.rows:
        by_seed = finals.get((row.label, 0), {})
        if by_seed:
            rows.append(_row(row.label, row.method, by_seed, targets, floors, rule))
        elif row.label in plan.inapplicable:
            why = plan.inapplicable[row.label]
            rows.append(BoardRow(row.label, row.method, inapplicable=why))
    if floor_row is not None:
        rows.append(floor_row)
    trials = _trials(plan, store)
    for board_row in rows:
        own = [trial for trial in trials if trial.label == board_row.label]
        board_row.trials = len(own)
        for trial in own:
            if trial.chosen:
                board_row.chosen, board_row.edges = dict(trial.params), trial.edges
    return Leaderboard(
        suite,
        rule,
        specs,
        _ranked(rows),
        floor,
        _compare(suite, rows),
        trials,
        missing,
        records,
        stages,
        audit_tables(suite, store),
    )


def _compared(
    suite: ResolvedSuite,
    finals: FinalRecords,
    stages: Mapping[tuple[str, int, int], Stage],
    store: StageStore,
) -> FinalRecords:
    """The records with the metrics that need Retrain's scores too."""
    benchmark, retrain = BENCHMARKS[suite.spec.benchmark], _retrain_label(suite)
    targets = finals.get((retrain, 0), {})

    @functools.cache
    def scores(label: str, replicate: int, seed: int) -> dict[str, Scores]:
        return read_scores(store, stages[label, replicate, seed])

    compared: FinalRecords = {}
    for (row, replicate), by_seed in finals.items():
        for seed, record in by_seed.items():
            target = targets.get(seed)
            if record.status == "ok" and target is not None and target.status == "ok":
                ours, theirs = scores(row, replicate, seed), scores(retrain, 0, seed)
                metrics = {**record.metrics, **benchmark.compare(suite.protocol, ours, theirs)}
                record = record.model_copy(update={"metrics": metrics})
            compared.setdefault((row, replicate), {})[seed] = record
    return compared


def _check_one_data_set(records: Sequence[tuple[str, RunRecord]]) -> None:
    """Gaps between models of different data mean nothing."""
    by_digest: dict[str, RunRecord] = {}
    for _, record in records:
        by_digest.setdefault(record.data.get("digest", ""), record)
    if len(by_digest) > 1:
        (one, first), (two, second) = list(by_digest.items())[:2]
        raise DataError(
            f"the data changed between runs: seed {first.seed} was measured on {one[:12]}, seed "
            f"{second.seed} on {two[:12]} ({second.data.get('provenance', '?')}); use the same "
            "data or another --store"
        )


def _retrain_label(suite: ResolvedSuite) -> str:
    return next((row.label for row in suite.rows if row.method == "retrain"), "retrain")


def _floor(
    finals: Mapping[tuple[str, int], Mapping[int, RunRecord]],
    targets: Mapping[int, RunRecord],
    suite: ResolvedSuite,
    rule: GapRule,
) -> tuple[Floor, BoardRow | None]:
    second = finals.get((_retrain_label(suite), 1), {})
    empty: dict[str, float | None] = {}
    firsts = [dict(targets[seed].metrics) for seed in sorted(targets)]
    seconds = [dict(second[s].metrics) if s in second else empty for s in sorted(targets)]
    floor = retrain_floor(firsts, seconds, rule.metrics)
    if not second:
        return floor, None
    return floor, _row(FLOOR, "retrain", second, targets, {}, rule)


def _row(
    label: str,
    method: str,
    by_seed: Mapping[int, RunRecord],
    targets: Mapping[int, RunRecord],
    floors: Mapping[int, float | None],
    rule: GapRule,
) -> BoardRow:
    row = BoardRow(label, method, sorted(by_seed))
    row.diverged = {s: r.status_detail for s, r in by_seed.items() if r.status != "ok"}
    good = {seed: by_seed[seed] for seed in row.seeds if seed not in row.diverged}
    for name in sorted({name for record in good.values() for name in record.metrics}):
        row.metrics |= _summary(name, [r.metrics.get(name) for r in good.values()])
    paired = {
        seed: (r.metrics, targets[seed].metrics)
        for seed, r in good.items()
        if seed in targets and targets[seed].status == "ok"
    }
    if paired:
        for name in row.metrics:
            row.gaps |= _summary(name, [gap(a, b, name) for a, b in paired.values()])
        ags = [average_gap(a, b, rule.metrics) for a, b in paired.values()]
        row.derived |= _summary("ag", ags)
        for column in rule.also:
            values = [derived(a, b, column, rule) for a, b in paired.values()]
            row.derived |= _summary(column.name, values)
        row.ag_per_seed = {s: ag for s, ag in zip(paired, ags, strict=True) if ag is not None}
    if row.method != "retrain":
        seeds = list(row.ag_per_seed)
        row.separability = separability(
            [row.ag_per_seed[s] for s in seeds], [floors.get(s) for s in seeds]
        )
    row.dynamics = _means([record.dynamics for record in good.values()])
    row.cost = _means([record.cost for record in by_seed.values()])
    return row


def _summary(name: str, values: Sequence[float | None]) -> dict[str, Summary]:
    defined = [value for value in values if value is not None]
    return {name: summarise(defined)} if defined and len(defined) == len(values) else {}


def _means(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    means = {}
    for name in sorted({key for row in rows for key in row}):
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values:
            means[name] = math.fsum(values) / len(values)
    return means


def _ranked(rows: list[BoardRow]) -> list[BoardRow]:
    """Retrain first, then by AG; rows that diverged on some seeds after those that did not."""

    def order(row: BoardRow) -> tuple[int, float]:
        if row.method == "retrain":
            return (0, 1.0 if row.label == FLOOR else 0.0)
        ag = row.derived.get("ag")
        return (2 if row.diverged else 1, ag.mean) if ag else (3, 0.0)

    return sorted(rows, key=order)


def _compare(suite: ResolvedSuite, rows: Sequence[BoardRow]) -> list[Comparison]:
    by_label = {row.label: row for row in rows}
    result = []
    for first, second in suite.spec.compare:
        if first not in by_label or second not in by_label:
            continue
        a, b = by_label[first].ag_per_seed, by_label[second].ag_per_seed
        seeds = sorted(set(a) & set(b))
        if seeds:
            difference = paired_difference([a[s] for s in seeds], [b[s] for s in seeds])
            result.append(Comparison(first, second, difference))
    return result


def _trials(plan: Plan, store: StageStore) -> list[Trial]:
    rule = BENCHMARKS[plan.suite.spec.benchmark].gap_of(plan.suite.protocol)
    targets = {r.seed: read_record(store, r.stage) for r in plan.results if r.trial == -1}
    gaps: dict[tuple[str, int], list[float]] = {}
    for result in plan.results:
        if result.trial is None or result.trial < 0:
            continue
        record, target = read_record(store, result.stage), targets.get(result.seed)
        if record is not None and target is not None:
            gaps.setdefault((result.label, result.trial), []).append(
                trial_gap(record, target, rule)
            )
    trials = []
    for (label, index), values in gaps.items():
        search, draws = plan.suite.row(label).search, plan.draws[label]
        assert search is not None
        varied = _varied([canonical(draw.config) for draw in draws])
        params = {key: values_[index] for key, values_ in varied.items()}
        chosen = plan.chosen.get(label) == index
        edges = search.edges(draws[index]) if chosen else ()
        trials.append(Trial(label, params, math.fsum(values) / len(values), chosen, edges))
    return trials


def _varied(configs: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, list[Any]]:
    """Parameters that differ between configs -> their values, dots for nesting."""
    varied: dict[str, list[Any]] = {}
    for key in configs[0]:
        values = [config[key] for config in configs]
        if all(isinstance(value, Mapping) for value in values):
            varied |= _varied(values, f"{prefix}{key}.")
        elif any(value != values[0] for value in values):
            varied[prefix + key] = values
    return varied
