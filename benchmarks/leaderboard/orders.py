"""A second order of rows: by the column in which a row is worst, in units of the noise floor.

A mean such as AG4 hides a column behind the others, and counts points of a column in which two
Retrains agree like points of one in which they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import (
    BoardRow,
    Comparison,
    FinalRecords,
    Leaderboard,
    Worst,
)
from stable_forgetting.benchmarks.leaderboard.judge import label_of
from stable_forgetting.benchmarks.leaderboard.verdicts import STEP
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.gaps import PairedDifference, gap, paired_difference
from stable_forgetting.common.measure.ranking import ranks, shown
from stable_forgetting.common.measure.rules import Rule
from stable_forgetting.common.measure.verdict import LEVEL, holm_by_key
from stable_forgetting.common.store.records import RunRecord


def add_worst(
    rows: Sequence[BoardRow],
    suite: ResolvedSuite,
    rule: Rule,
    finals: FinalRecords,
    answers: Sequence[str] = (),
) -> None:
    """Finds the worst column of every row; none without a second Retrain.

    To both distances the smallest one of the column is added: where two Retrains agree to the last
    sample, a row is as many times as far as it differs by samples, and not infinitely far.

    Args:
        rows: Of the table.
        suite: Whose rows they are.
        rule: Its metrics count by their absolute gap to the seed's Retrain.
        finals: Records of all final models.
        answers: Metrics that are distances to Retrain themselves.
    """
    retrain = label_of(suite, "retrain")
    targets, second = finals.get((retrain, 0), {}), finals.get((retrain, 1), {})
    if rule.goals or not second:
        return
    for metric in (*rule.metrics, *answers):
        itself = metric in answers
        floor = _distances(second, targets, metric, itself)
        of_rows = {
            row.label: _distances(finals.get((row.label, 0), {}), targets, metric, itself)
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
            found = Worst((fmean(values) + step) / unit, metric)
            row.worst = found if row.worst is None else max(row.worst, found)


def _distances(
    records: Mapping[int, RunRecord], targets: Mapping[int, RunRecord], metric: str, itself: bool
) -> list[float]:
    """Distances to the seed's Retrain in one column; nothing where one of them is unknown."""
    found = [
        record.metrics.get(metric) if itself else gap(record.metrics, targets[seed].metrics, metric)
        for seed, record in records.items()
        if seed in targets
    ]
    known = [abs(value) for value in found if value is not None]
    return known if len(known) == len(found) else []


def disagreement_line(board: Leaderboard) -> str:
    """Which rows the two orders place differently: beyond what the seeds leave open."""
    rows = [row for row in board.rows if row.rank and row.worst and row.method not in REFERENCES]
    if not rows:
        return ""
    places = ranks(shown(np.array([row.worst.ratio for row in rows if row.worst])))
    moved = [
        f"{row.label} ({row.rank.rank} by {board.rule.title}, {place} by the worst column)"
        for row, place in zip(rows, places.tolist(), strict=True)
        if row.rank and not row.rank.low <= place <= row.rank.high
    ]
    text = "Order by the worst column, as a multiple of the second Retrain's distance: "
    if not moved:
        return f"{text}every row has a place that {board.rule.title} and its seeds allow."
    return (
        f"{text}another place than {board.rule.title} and its seeds allow have {', '.join(moved)}."
    )


NEGLIGIBLE = 0.005
"""Differences of AG that two decimals do not show are none, however small their spread."""


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


def comparison_line(board: Leaderboard, comparison: Comparison) -> str:
    """A paired difference in words; p decides once it is corrected for the pairs of the table."""
    summary, q = comparison.difference.summary, comparison.q
    interval, reading = "", "no difference shown"
    target = "its goals" if board.rule.goals else "Retrain"
    if summary.low is not None and summary.high is not None:
        interval = f", 95 % CI [{summary.low:+.2f}, {summary.high:+.2f}]"
    if q is not None and q <= LEVEL:
        closer = comparison.first if summary.mean < 0 else comparison.second
        reading = f"{closer} is closer to {target}"
    if abs(summary.mean) < NEGLIGIBLE:
        reading = "the same to two decimals"
    return (
        f"{board.rule.title} of {comparison.first} − {comparison.second}: {summary.mean:+.2f}"
        f"{interval}{'' if q is None else f', p {q:.2g}'}, n {summary.n}: {reading}."
    )
