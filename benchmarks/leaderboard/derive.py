"""Records -> leaderboard: gaps to the seed-paired Retrain, the noise floor, intervals, ranks.

Nothing here is stored as truth: a table is derived from records each time it is made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from stable_forgetting.benchmarks.audits.report import audit_tables
from stable_forgetting.benchmarks.audits.stored import StoredPlan, stored_plan
from stable_forgetting.benchmarks.leaderboard.board import (
    BoardRow,
    FinalRecords,
    Leaderboard,
    Noisy,
)
from stable_forgetting.benchmarks.leaderboard.folds import forgotten
from stable_forgetting.benchmarks.leaderboard.judge import (
    Judge,
    add_ranks,
    add_verdicts,
    add_worst,
    compare_rows,
    finals_of,
    label_of,
    second_of,
)
from stable_forgetting.benchmarks.leaderboard.tuning import read_trials, tuned_on
from stable_forgetting.benchmarks.pipeline.measuring import read_record, read_scores, read_table
from stable_forgetting.benchmarks.pipeline.stage import Placed, Probed, Result
from stable_forgetting.benchmarks.suite.goals import metric_specs
from stable_forgetting.benchmarks.suite.remembered import suite_digest
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.benchmarks.sweeps.board import make_sweep
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.gaps import (
    Floor,
    Summary,
    derived,
    gap,
    retrain_floor,
    summarise,
)
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.measure.metric import Row
from stable_forgetting.common.measure.rules import RowFacts, Rule
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Benchmark
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore


def make_leaderboard(suite: ResolvedSuite, store: StageStore) -> Leaderboard:
    """The table of a suite, and those of earlier folds: its stored plan, and the records there."""
    plan = stored_plan(suite, store)
    board = _board(suite, store, plan)
    folds = zip(suite.folds, plan.folds, strict=True)
    board.folds = [_board(fold, store, of_fold, board.noisy) for fold, of_fold in folds]
    board.missing += sum(fold.missing for fold in board.folds)
    board.forgotten = forgotten(suite, store, plan)
    board.pooled = _pooled_floor(suite, store, plan, board.noisy)
    return board


def _pooled_floor(suite: ResolvedSuite, store: StageStore, plan: StoredPlan, noisy: Noisy) -> Floor:
    """The floor over every pair of Retrains of this protocol in the store."""
    finals = _read(suite, store, plan.pooled, ())[0]
    try:
        _check_one_data_set([r for of_row in finals.values() for r in of_row.values()])
    except DataError:  # those seeds saw other data
        return Floor((), None)
    return _floor(Judge(suite, finals, noisy))


def _board(
    suite: ResolvedSuite, store: StageStore, plan: StoredPlan, noisy: Noisy | None = None
) -> Leaderboard:
    finals, missing = _read(suite, store, plan.results, plan.probes)
    stages = {
        (r.label, r.replicate, r.seed): r.stage
        for r in plan.results
        if r.trial is None and r.seed in finals.get((r.label, r.replicate), {})
    }
    records = [(label, finals[label, replicate][seed]) for label, replicate, seed in stages]
    sizes = _sizes(stages, store)
    board = derive(suite, records, sizes, plan.inapplicable, noisy=noisy)
    board.trials, open_trials = read_trials(suite, plan, store)
    unsplit = len({seed for _, _, seed in stages} - sizes.keys())
    board.missing = plan.waiting + missing + open_trials + unsplit
    board.plan, board.stages = plan, stages
    for row in board.rows:
        own = [trial for trial in board.trials if trial.label == row.label]
        row.trials = len(own)
        for trial in own:
            if trial.chosen:
                row.chosen, row.edges = dict(trial.params), trial.edges
    if board.trials and not board.rule.goals:
        add_ranks(board.rows, board.trials)
    board.audits, board.attacked = audit_tables(suite, store, plan)
    board.tuned_on = tuned_on(suite, plan, store) if suite.spec.tune else ""
    if suite.spec.grid:
        board.sweep = make_sweep(suite, store, plan, board.audits)
        board.missing += board.sweep.missing
    return board


def _read(
    suite: ResolvedSuite,
    store: StageStore,
    results: Sequence[Result[Placed]],
    probes: Sequence[Probed[Placed]],
) -> tuple[FinalRecords, int]:
    """The records of final models with all of their metrics, and how many files are missing."""
    stages = {(r.label, r.replicate, r.seed): r.stage for r in results if r.trial is None}
    finals: FinalRecords = {}
    missing = 0
    for (label, replicate, seed), stage in stages.items():
        record = read_record(store, stage)
        if record is None:
            missing += 1
        else:
            finals.setdefault((label, replicate), {})[seed] = record
    for entry in probes:
        made, of = read_table(store, entry.stage), entry.result
        by_seed = finals.get((of.label, of.replicate), {})
        missing += made is None
        if made and made.rows and of.seed in by_seed:
            metrics = suite.probes[entry.name].added(by_seed[of.seed].metrics, made)
            by_seed[of.seed] = by_seed[of.seed].model_copy(update={"metrics": metrics})

    @functools.cache
    def scores(label: str, replicate: int, seed: int) -> dict[str, Scores]:
        stage = stages[label, replicate, seed]
        there = store.done(stage.parents["scores"].kind, stage.parents["scores"].key)
        return {} if there is None else read_scores(store, stage)

    return compared(suite, finals, scores), missing


def derive(
    suite: ResolvedSuite,
    records: Sequence[tuple[str, RunRecord]],
    sizes: Mapping[int, int],
    inapplicable: Mapping[str, str] | None = None,
    *,
    digest: str = "",
    noisy: Noisy | None = None,
) -> Leaderboard:
    """The table of records, whoever measured them.

    Args:
        records: (row label, record) of every final model, with all of its metrics.
        sizes: Seed -> samples in the forget set.
        inapplicable: Row label -> why it says nothing about the benchmark.
        digest: What tells the table apart; the suite's own when empty.
        noisy: Columns that weigh nothing, as another table decided; of these records when absent.
    """
    _check_one_data_set([record for _, record in records])
    judge = Judge(suite, finals_of(records), noisy)
    rows = []
    for row in suite.rows:
        by_seed = judge.finals.get((row.label, 0), {})
        if by_seed:
            rows.append(_row(row.label, row.method, by_seed, judge))
        elif why := (inapplicable or {}).get(row.label):
            rows.append(BoardRow(row.label, row.method, inapplicable=why))
    if second := judge.of("retrain", 1):
        rows.append(_row(FLOOR, "retrain", second, judge))
    add_verdicts(rows, judge)
    add_worst(rows, judge)
    if not judge.rule.goals:
        add_ranks(rows)
    return Leaderboard(
        suite,
        judge.rule,
        metric_specs(suite.spec, suite.probes),
        _ranked(rows, judge.rule),
        _floor(judge),
        compare_rows(suite, rows),
        list(records),
        sizes,
        digest or suite_digest(suite),
        noisy=judge.noisy,
    )


def compares(benchmark: type[Benchmark]) -> bool:
    """Whether a benchmark has metrics that need Retrain's scores."""
    ours, default = benchmark.compare, Benchmark.compare
    return ours.__func__ is not default.__func__  # type: ignore[attr-defined]


def compared(
    suite: ResolvedSuite,
    finals: FinalRecords,
    scores: Callable[[str, int, int], Mapping[str, Scores]],
) -> FinalRecords:
    """The records with the metrics that need Retrain's scores too.

    ``scores``: (row label, replicate, seed) -> part -> scores; empty where they are not there.
    """
    benchmark, retrain = BENCHMARKS[suite.spec.benchmark], label_of(suite, "retrain")
    if not compares(benchmark):
        return finals
    result: FinalRecords = {}
    for (row, replicate), by_seed in finals.items():
        for seed, record in by_seed.items():
            metrics = dict(record.metrics)
            for other in (0, 1):
                target = finals.get((retrain, other), {}).get(seed)
                if record.status != "ok" or target is None or target.status != "ok":
                    continue
                sides = scores(row, replicate, seed), scores(retrain, other, seed)
                if not all(sides) or (other and not benchmark.answer_metrics):
                    continue
                made = benchmark.compare(suite.protocol, *sides)
                if other:  # the distances per sample to the second Retrain
                    kept = [name for name in benchmark.answer_metrics if name in made]
                    made = {second_of(name): made[name] for name in kept}
                metrics |= made
            record = record.model_copy(update={"metrics": metrics})
            result.setdefault((row, replicate), {})[seed] = record
    return result


def _check_one_data_set(records: Sequence[RunRecord]) -> None:
    """Gaps between models of different data mean nothing."""
    by_digest: dict[str, RunRecord] = {}
    for record in records:
        by_digest.setdefault(record.data.get("digest", ""), record)
    if len(by_digest) > 1:
        (one, first), (two, second) = list(by_digest.items())[:2]
        raise DataError(
            f"the data changed between runs: seed {first.seed} was measured on {one[:12]}, seed "
            f"{second.seed} on {two[:12]} ({second.data.get('provenance', '?')}); use the same "
            "data or another --store"
        )


def _sizes(stages: Mapping[tuple[str, int, int], Placed], store: StageStore) -> dict[int, int]:
    """Seed -> samples in the forget set, as far as the splits are there."""
    sizes = {}
    for (_, _, seed), stage in stages.items():
        split = stage.parents["split"]
        facts = store.done(split.kind, split.key)
        if seed not in sizes and facts is not None:
            sizes[seed] = int(facts["sizes"]["forget"])
    return sizes


def _floor(judge: Judge) -> Floor:
    if judge.rule.goals:
        return Floor((), None)
    targets, second = judge.of("retrain"), judge.of("retrain", 1)
    empty: Row = {}

    def distance(row: Row, target: Row) -> float | None:
        return judge.rule.distance(row, References(retrain=target), trial=False)

    firsts = [targets[seed].metrics for seed in sorted(targets)]
    seconds = [second[s].metrics if s in second else empty for s in sorted(targets)]
    return retrain_floor(firsts, seconds, distance)


def _row(label: str, method: str, by_seed: Mapping[int, RunRecord], judge: Judge) -> BoardRow:
    row = BoardRow(label, method, sorted(by_seed))
    row.diverged = {s: r.status_detail for s, r in by_seed.items() if r.status != "ok"}
    good = {seed: by_seed[seed] for seed in row.seeds if seed not in row.diverged}
    for name in sorted({name for record in good.values() for name in record.metrics}):
        row.metrics |= _summary(name, [r.metrics.get(name) for r in good.values()])
    paired = {
        seed: (r.metrics, target)
        for seed, r in good.items()
        if (target := judge.references[seed].retrain) is not None
    }
    for name in row.metrics if paired else ():
        row.gaps |= _summary(name, [gap(a, b, name) for a, b in paired.values()])
    for column in judge.rule.also if paired else ():
        over = judge.rule.metrics, judge.rule.kept
        values = [derived(a, b, column, *over) for a, b in paired.values()]
        row.derived |= _summary(column.name, values)
    judge.judge(row, {seed: record.metrics for seed, record in good.items()})
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


def _ranked(rows: list[BoardRow], rule: Rule) -> list[BoardRow]:
    """Retrain first, then by the rule; rows that diverged on some seed after the others."""

    def order(row: BoardRow) -> tuple[float, ...]:
        if row.method == "retrain":
            return (0, 1.0 if row.label == FLOOR else 0.0)
        distance = row.derived.get("ag")
        if distance is None:
            return (3,)
        means = {name: summary.mean for name, summary in row.metrics.items()}
        share = sum(answer is True for answer in row.reached.values()) / len(row.seeds)
        facts = RowFacts(distance.mean, means, share, row.cost.get("steps", 0.0))
        return (2 if row.diverged else 1, *rule.order(facts))

    return sorted(rows, key=order)
