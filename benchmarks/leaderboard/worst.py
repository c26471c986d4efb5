"""A second order of rows: by the column in which a row is worst, in units of the noise floor.

A mean such as AG4 hides a column behind the others, and counts points of a column in which two
Retrains agree like points of one in which they do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import (
    BoardRow,
    FinalRecords,
    Leaderboard,
    Worst,
)
from stable_forgetting.benchmarks.leaderboard.judge import label_of
from stable_forgetting.benchmarks.leaderboard.verdicts import STEP
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.gaps import gap
from stable_forgetting.common.measure.ranking import ranks, shown
from stable_forgetting.common.measure.rules import Rule
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
        unit = _mean(floor) + step
        for row in rows:
            values = of_rows[row.label]
            if row.method == "retrain" or row.diverged or not values:
                continue
            found = Worst((_mean(values) + step) / unit, metric)
            row.worst = found if row.worst is None else max(row.worst, found)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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
