"""Verdicts and ranks of a leaderboard's rows: what can be told with its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, FinalRecords, Rank
from stable_forgetting.benchmarks.leaderboard.judge import label_of
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.measure.metric import Row
from stable_forgetting.common.measure.ranking import rank_intervals, ranks, shown
from stable_forgetting.common.measure.rules import Rule
from stable_forgetting.common.measure.verdict import judge, oddness


def add_verdicts(
    rows: Sequence[BoardRow],
    suite: ResolvedSuite,
    rule: Rule,
    finals: FinalRecords,
    sizes: Mapping[int, int],
) -> None:
    """Judges the rows against the Retrains of their seeds.

    A row that diverged on a seed gets no verdict.  Methods are corrected for each other; Original
    is no guess among them and is judged by itself.

    Args:
        rows: Of the table; those of Retrains are left alone.
        suite: Whose rows they are.
        rule: What a distance is.
        finals: Records of all final models.
        sizes: Seed -> samples in the forget set.
    """
    retrains = [finals.get((label_of(suite, "retrain"), k), {}) for k in range(suite.spec.retrains)]
    seeds = [
        seed
        for seed in sizes
        if all(seed in by_seed and by_seed[seed].status == "ok" for by_seed in retrains)
    ]
    resolutions = [rule.resolution(sizes[seed]) for seed in seeds]
    if len(retrains) < 2 or None in resolutions:
        return
    resolution = max((value for value in resolutions if value is not None), default=0.0)
    groups: dict[bool, dict[str, np.ndarray]] = {}
    for row in rows:
        own = finals.get((row.label, 0), {})
        if row.method == "retrain" or row.diverged:
            continue
        members = [
            [record.metrics for record in (own[seed], *(by_seed[seed] for by_seed in retrains))]
            for seed in seeds
            if seed in own
        ]
        distances = [_distances(of_seed, rule) for of_seed in members]
        measured = [matrix for matrix in distances if matrix is not None]
        if measured and len(measured) == len(distances):
            scores = oddness(np.stack(measured), resolution)
            groups.setdefault(row.method in REFERENCES, {})[row.label] = scores
    verdicts = {label: v for group in groups.values() for label, v in judge(group).items()}
    for row in rows:
        row.verdict = verdicts.get(row.label)


def _distances(members: Sequence[Row], rule: Rule) -> np.ndarray | None:
    """(K + 1, K + 1) distances between the members of a seed; None if one is unknown."""
    matrix = np.zeros((len(members), len(members)))
    for i, ours in enumerate(members):
        for j in range(i):
            distance = rule.distance(ours, References(retrain=members[j]), trial=False)
            if distance is None:
                return None
            matrix[i, j] = matrix[j, i] = distance
    return matrix


def add_ranks(rows: Sequence[BoardRow]) -> None:
    """Ranks the methods by their mean distance, as far as they have every seed of the table."""
    methods = [row for row in rows if row.method not in REFERENCES and not row.diverged]
    seeds = {seed for row in methods for seed in row.ag_per_seed}
    methods = [row for row in methods if seeds and row.ag_per_seed.keys() == seeds]
    if not methods:
        return
    values = np.array([[row.ag_per_seed[seed] for seed in sorted(seeds)] for row in methods])
    means, (low, high) = ranks(shown(values.mean(1))), rank_intervals(values)
    for row, *ends in zip(methods, means, low, high, strict=True):
        row.rank = Rank(*map(int, ends))
