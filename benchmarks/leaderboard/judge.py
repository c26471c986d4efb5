"""What a row is judged by: distance, goals, rule sets, verdict, rank, and its worst column."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import (
    BoardRow,
    Comparison,
    FinalRecords,
    Noisy,
    Rank,
    Trial,
    Worst,
)
from stable_forgetting.benchmarks.pipeline.measuring import references
from stable_forgetting.benchmarks.suite.goals import rule_sets
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.gaps import (
    PairedDifference,
    charged_gap,
    gap,
    paired_difference,
    summarise,
)
from stable_forgetting.common.measure.goal import References, Role
from stable_forgetting.common.measure.metric import Row
from stable_forgetting.common.measure.ranking import rank_intervals, ranks, shown
from stable_forgetting.common.measure.verdict import Evidence, Verdict, holm_by_key
from stable_forgetting.common.measure.verdict import judge as judge_group
from stable_forgetting.common.store.records import RunRecord

ROLES: tuple[Role, ...] = ("original", "retrain")
STEP = 1e-9
"""Distances below are rounding; the smallest one above is the resolution of a table."""


def label_of(suite: ResolvedSuite, role: Role) -> str:
    """The row label of a reference model; the role itself where the suite has no such row."""
    return next((row.label for row in suite.rows if row.method == role), role)


def second_of(metric: str) -> str:
    """The name of a distance to Retrain where it is taken to the second Retrain."""
    return f"{metric}_second"


def finals_of(records: Iterable[tuple[str, RunRecord]]) -> FinalRecords:
    """The records of final models by row, replicate and seed."""
    finals: FinalRecords = {}
    for label, record in records:
        finals.setdefault((label, record.replicate), {})[record.seed] = record
    return finals


class Judge:
    """Judges rows by the benchmark's rule and the suite's rule sets.

    Attributes:
        rule: The benchmark's, without the columns that weigh nothing in this table.
        noisy: See :func:`noisy_columns`; of these records where none are given.
        answers: Metrics that are distances per sample to Retrain themselves.
        references: Seed -> metrics of its reference models.
    """

    def __init__(self, suite: ResolvedSuite, finals: FinalRecords, noisy: Noisy | None = None):
        benchmark = BENCHMARKS[suite.spec.benchmark]
        self.suite, self.finals = suite, finals
        self.rule, self.answers = benchmark.gap_of(suite.protocol), benchmark.answer_metrics
        self.noisy = noisy_columns(self) if noisy is None else noisy
        if self.noisy:
            weighing = tuple(name for name in self.rule.metrics if name not in self.noisy)
            self.rule = replace(self.rule, metrics=weighing or self.rule.metrics)
        self._sets = rule_sets(suite.spec)
        by_role = {role: self.of(role) for role in ROLES}
        self.references: Mapping[int, References] = defaultdict(
            References,
            {
                seed: references({role: by_role[role].get(seed) for role in ROLES})
                for seed in {seed for by_seed in by_role.values() for seed in by_seed}
            },
        )

    def of(self, role: Role, replicate: int = 0) -> dict[int, RunRecord]:
        """Seed -> record of a reference model."""
        return self.finals.get((label_of(self.suite, role), replicate), {})

    def judge(self, row: BoardRow, metrics: Mapping[int, Row]) -> None:
        """Fills in a row's distances, reached goals and criteria.

        ``metrics`` holds those of the seeds that did not diverge.
        """
        comparable, parts = 0, []
        for seed, own in metrics.items():
            targets = self.references[seed]
            comparable += all(targets.of(role) is not None for role in self.rule.needs)
            distance = self.rule.distance(own, targets, trial=False)
            if distance is not None:
                row.ag_per_seed[seed] = distance
                parts.append(self.rule.contributions(own, targets) or {})
            if self.rule.goals:
                answers = [goal.reached(own, targets) for goal in self.rule.goals]
                unknown = None if None in answers else True
                row.reached[seed] = False if False in answers else unknown
            for name, rules in self._sets.items():
                row.criteria.setdefault(name, {})[seed] = rules.judge(own, targets)
        if row.ag_per_seed and len(row.ag_per_seed) == comparable:
            row.derived["ag"] = summarise(list(row.ag_per_seed.values()))
            row.parts = {m: math.fsum(p[m] for p in parts) / len(parts) for m in parts[0]}
            for axis in self.rule.axes:
                values = [math.fsum(p.get(m, 0.0) for m in axis.weights) for p in parts]
                row.derived[axis.name] = summarise([len(self.rule.axes) * v for v in values])


def noisy_columns(judge: Judge) -> Noisy:
    """The columns of a table in which two Retrains lie farther apart than its methods from Retrain.

    Returns:
        Metric -> the root mean square gap of the second Retrain to the first, and that of the
        methods' mean gaps.  Nothing without a second Retrain, of fewer than two methods, and where
        the benchmark's rule does not ask for it.
    """
    found: dict[str, tuple[float, float]] = {}
    for metric in judge.rule.metrics if judge.rule.drops_noise else ():
        gaps = _signed(judge.of("retrain", 1), judge, metric)
        means = [
            fmean(values)
            for row in judge.suite.rows
            if row.method not in REFERENCES
            and (values := _signed(judge.finals.get((row.label, 0), {}), judge, metric))
        ]
        if gaps and len(means) > 1:
            apart, away = (math.sqrt(fmean(v**2 for v in values)) for values in (gaps, means))
            found |= {metric: (apart, away)} if apart > away else {}
    return found


def _signed(records: Mapping[int, RunRecord], judge: Judge, metric: str) -> list[float]:
    """Gaps to the seed's Retrain on the seeds that did not diverge, as far as they are known."""
    targets = judge.of("retrain")
    found = [
        gap(record.metrics, targets[seed].metrics, metric)
        for seed, record in records.items()
        if record.status == "ok" and seed in targets
    ]
    return [value for value in found if value is not None]


# Verdicts -----------------------------------------------------------------------------------------


def add_verdicts(rows: Sequence[BoardRow], judge: Judge) -> None:
    """Judges the rows that did not diverge against the Retrains of their seeds.

    Methods are corrected for each other; Original is no guess among them and is judged by itself.
    """
    retrains = [judge.of("retrain", k) for k in range(judge.suite.spec.retrains)]
    if len(retrains) < 2 or judge.rule.goals:
        return
    seeds = [s for s in retrains[0] if all(s in by and by[s].status == "ok" for by in retrains)]
    groups: dict[bool, dict[str, list[list[Row]]]] = {True: {}, False: {}}
    for row in rows:
        own = judge.finals.get((row.label, 0), {})
        if row.method != "retrain" and not row.diverged:
            groups[row.method in REFERENCES][row.label] = [
                [record.metrics for record in (own[seed], *(by_seed[seed] for by_seed in retrains))]
                for seed in seeds
                if seed in own
            ]
    verdicts = {label: v for g in groups.values() for label, v in _verdicts(g, judge).items()}
    for row in rows:
        row.verdict = verdicts.get(row.label)


def _verdicts(group: Mapping[str, Sequence[Sequence[Row]]], judge: Judge) -> dict[str, Verdict]:
    """Of the rows of which all distances between the members of every seed are known."""
    averages = {
        label: matrices
        for label, members in group.items()
        if (matrices := _stacked([_distances(of_seed, judge) for of_seed in members])) is not None
    }
    steps = [m[m > STEP].min() for m in averages.values() if (m > STEP).any()]
    resolution = float(min(steps, default=1.0))
    answers = {
        label: _stacked([_answers(of_seed, judge.answers[0]) for of_seed in group[label]])
        for label in (averages if judge.answers else ())
    }
    return judge_group(
        {
            label: Evidence(matrices, resolution, answers.get(label))
            for label, matrices in averages.items()
        }
    )


def _stacked(matrices: Sequence[np.ndarray | None]) -> np.ndarray | None:
    known = [matrix for matrix in matrices if matrix is not None]
    return np.stack(known) if known and len(known) == len(matrices) else None


def _answers(members: Sequence[Row], name: str) -> np.ndarray | None:
    """(3, 3) distances per sample of a model and two Retrains; None if one is unknown."""
    model, _, second = members[:3]
    values = (model.get(name), model.get(second_of(name)), second.get(name))
    if None in values:
        return None
    matrix = np.zeros((3, 3))
    matrix[[0, 0, 1], [1, 2, 2]] = values
    return matrix + matrix.T


def _distances(members: Sequence[Row], judge: Judge) -> np.ndarray | None:
    """(K + 1, K + 1) distances from each member of a seed to the others; None if one is unknown."""
    matrix = np.zeros((len(members), len(members)))
    for i, j in itertools.permutations(range(len(members)), 2):
        distance = judge.rule.distance(members[i], References(retrain=members[j]), trial=False)
        if distance is None:
            return None
        matrix[i, j] = distance
    return matrix


# Orders -------------------------------------------------------------------------------------------


def add_ranks(rows: Sequence[BoardRow], trials: Sequence[Trial] = ()) -> None:
    """Ranks the methods by their mean distance, as far as they have every seed of the table.

    Other draws of the ``trials`` of tuning could have ended otherwise.
    """
    methods = [row for row in rows if row.method not in REFERENCES and not row.diverged]
    seeds = {seed for row in methods for seed in row.ag_per_seed}
    methods = [row for row in methods if seeds and row.ag_per_seed.keys() == seeds]
    if not methods:
        return
    values = np.array([[row.ag_per_seed[seed] for seed in sorted(seeds)] for row in methods])
    tuned = [[trial.gap for trial in trials if trial.label == row.label] for row in methods]
    means, (low, high) = ranks(shown(values.mean(1))), rank_intervals(values, tuned)
    for row, *ends in zip(methods, means, low, high, strict=True):
        row.rank = Rank(*map(int, ends))


def add_worst(rows: Sequence[BoardRow], judge: Judge) -> None:
    """Finds the column in which a row is worst, in units of the noise floor; none without one.

    A mean such as AG4 hides a column behind the others, and counts points of a column in which two
    Retrains agree like points of one in which they do not.  To both distances the smallest one of
    the column is added: where two Retrains agree to the last sample, a row is as many times as far
    as it differs by samples, and not infinitely far.  A column of which a row has lost nothing, and
    of which more is no fault, is not its worst.
    """
    second = judge.of("retrain", 1)
    if judge.rule.goals or not second:
        return
    kept = judge.rule.kept
    for metric in (*judge.rule.metrics, *judge.answers):
        floor = _in_column(second, judge, metric, kept)
        of_rows = {
            row.label: _in_column(judge.finals.get((row.label, 0), {}), judge, metric, kept)
            for row in rows
        }
        known = [value for values in (floor, *of_rows.values()) for value in values]
        step = min((value for value in known if value > STEP), default=None)
        if step is None or not floor:
            continue
        unit = fmean(floor) + step
        for row in rows:
            values = of_rows[row.label]
            if row.method == "retrain" or row.diverged or not values:
                continue
            if metric in kept and not any(values):
                continue
            found = Worst((fmean(values) + step) / unit, metric)
            row.worst = found if row.worst is None else max(row.worst, found)


def _in_column(
    records: Mapping[int, RunRecord], judge: Judge, metric: str, kept: Sequence[str] = ()
) -> list[float]:
    """Distances to the seed's Retrain in one column; nothing where one of them is unknown."""
    targets, itself = judge.of("retrain"), metric in judge.answers
    found = [
        record.metrics.get(metric)
        if itself
        else charged_gap(record.metrics, targets[seed].metrics, metric, kept)
        for seed, record in records.items()
        if seed in targets
    ]
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else []


def compare_rows(suite: ResolvedSuite, rows: Sequence[BoardRow]) -> list[Comparison]:
    """The pairs that a suite asks for, paired by seed; p is corrected for them (Holm)."""
    by_label = {row.label: row for row in rows}
    found: dict[tuple[str, str], PairedDifference] = {}
    for first, second in suite.spec.compare:
        if first not in by_label or second not in by_label:
            continue
        a, b = by_label[first].ag_per_seed, by_label[second].ag_per_seed
        seeds = sorted(set(a) & set(b))
        if seeds:
            found[first, second] = paired_difference([a[s] for s in seeds], [b[s] for s in seeds])
    q = holm_by_key({pair: difference.p_value for pair, difference in found.items()})
    return [Comparison(*pair, difference, q.get(pair)) for pair, difference in found.items()]
