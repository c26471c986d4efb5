"""What reports say of verdicts, of other orders, and of pairs of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Comparison, Leaderboard
from stable_forgetting.benchmarks.leaderboard.tables import FACTOR, MARKS, reference_marks
from stable_forgetting.benchmarks.report.cells import MISSING, significant
from stable_forgetting.benchmarks.report.columns import DOCS
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.gaps import Summary
from stable_forgetting.common.measure.ranking import ranks, shown
from stable_forgetting.common.measure.rules import GapRule
from stable_forgetting.common.measure.verdict import LEAST_SEEDS, LEVEL, Median, Verdict

NEGLIGIBLE = 0.005
"""Differences of AG that two decimals do not show are none, however small their spread."""
SPREAD = 0.01
"""From this standard deviation on, seeds differ in the second decimal: means alike are chance."""
COLUMNS = {
    "odd": "counts the seeds on which the row is furthest from the others, ties shared",
    "p": "is exact over all ways to name one model of every seed the row's",
    "q": f"is p corrected for the methods (Benjamini and Hochberg); {LEVEL:g} or less is a "
    "difference",
    "ratio": "is the distance to the Retrains over that between them: the median over seeds and "
    f"its interval, each end of which errs in at most {100 * LEVEL:g} %",
    "answers": "is the same ratio of the distances per sample",
    "p of ≈": f"is that of both ratios being {FACTOR} or more, corrected for the methods (Holm); "
    f"{LEVEL:g} or less is indistinguishable",
    "needed": "is the ratio that these seeds could have shown to be a difference, of an undecided "
    "row",
}
"""Head -> what the column shows."""


def verdict_sections(board: Leaderboard) -> list[Section]:
    """The table behind the marks; none where nothing was judged."""
    rows = {row.label: row.verdict for row in board.rows if row.verdict}
    if not rows:
        return []
    retrains = board.suite.spec.retrains
    text = (
        f"On each seed the row's model is compared with {retrains} Retrains. A row as good as a "
        f"Retrain is the odd one out on one seed of {retrains + 1}. A row is indistinguishable if "
        f"its averages and its answers are shown to lie within {FACTOR} times the distance between "
        "Retrains. Original is judged by itself. A row that diverged on a seed is not judged."
    )
    columns = [Column(head, doc=doc) for head, doc in COLUMNS.items()]
    content = table(
        ["method", Column("verdict", "label", DOCS["verdict"]), *columns],
        [[label, *_cells(verdict)] for label, verdict in rows.items()],
        marks=reference_marks(board),
    )
    methods = [row for row in board.rows if row.verdict and row.method not in REFERENCES]
    return [Section("Verdicts", (text, _reach(methods, retrains + 1)), content, level="full")]


def _cells(verdict: Verdict) -> list[str]:
    needed = ""
    if verdict.word == "undecided":
        needed = "none" if verdict.detectable is None else _factor(verdict.detectable)
    return [
        f"{MARKS[verdict.word]} {verdict.word}".lstrip(),
        f"{verdict.odd:.3g}/{verdict.n}",
        significant(verdict.p),
        significant(min(1.0, verdict.q)),
        _ratio(verdict.ratio),
        MISSING if verdict.answers is None else _ratio(verdict.answers),
        significant(verdict.p_equivalent),
        needed,
    ]


def _ratio(ratio: Median) -> str:
    """``1.4 [0.9, 2.2]``; without an interval where there are too few seeds."""
    text = _factor(ratio.value)
    if ratio.low is None or ratio.high is None:
        return text
    return f"{text} [{_factor(ratio.low)}, {_factor(ratio.high)}]"


def _factor(log: float) -> str:
    return significant(math.exp(log))


def _reach(rows: Sequence[BoardRow], members: int) -> str:
    """What the seeds cannot show; empty where every row alone could, and of no row."""
    if not rows:
        return ""
    n = max(row.verdict.n for row in rows if row.verdict)
    if n < LEAST_SEEDS:
        return f"{n} seeds are too few for verdicts, which take {LEAST_SEEDS}: there are no marks."
    text = ""
    if 2.0**-n * len(rows) > LEVEL:
        text = f"With {n} seeds no row of {len(rows)} can be shown to be indistinguishable. "
    least = members**-n
    needed = math.ceil(least * len(rows) / LEVEL)
    if needed > 1:
        text += (
            f"p is {significant(least)} or more: at least {needed} of the {len(rows)} rows are "
            "called different, or none is."
        )
    return text.strip()


def order_lines(board: Leaderboard) -> list[str]:
    """Which rows other orders place differently: beyond what draws of seeds and trials leave open.

    The others are that by the worst column, and that without the columns that may not rank.
    """
    rule, lines = board.rule, []
    rows = [row for row in board.rows if row.rank and row.method not in REFERENCES]
    if worst := [row.worst.ratio for row in rows if row.worst]:
        head = "Order by the worst column, as a multiple of the second Retrain's distance"
        known = [row for row in rows if row.worst]
        lines.append(_moved(board, known, worst, head, "by the worst column"))
    if not isinstance(rule, GapRule):
        return lines
    doubted = [name for name in rule.weights() if name in rule.doubted]
    rest = [name for name in rule.weights() if name not in rule.doubted]
    if rows and doubted and rest:
        names = " and ".join(board.specs[name].title for name in doubted)
        head = f"Order without {names}, which may not rank by the metric cards"
        left = [math.fsum(row.parts[name] for name in rest) for row in rows]
        lines.append(_moved(board, rows, left, head, "without"))
    return lines


def _moved(
    board: Leaderboard, rows: Sequence[BoardRow], values: Sequence[float], head: str, how: str
) -> str:
    """The rows whose place by ``values`` lies outside of their rank's bracket, in words."""
    moved = [
        f"{row.label} ({row.rank.rank} by {board.rule.title}, {place} {how})"
        for row, place in zip(rows, ranks(shown(np.array(values))).tolist(), strict=True)
        if row.rank and not row.rank.low <= place <= row.rank.high
    ]
    allowed = f"{board.rule.title} and its seeds"
    if not moved:
        return f"{head}: every row has a place that {allowed} allow."
    return f"{head}: another place than {allowed} allow have {', '.join(moved)}."


def alike(difference: Summary) -> bool:
    """Whether two rows are the same to two decimals, in the mean and from seed to seed."""
    return abs(difference.mean) < NEGLIGIBLE and (difference.std or 0.0) < SPREAD


def comparison_line(board: Leaderboard, comparison: Comparison) -> str:
    """A paired difference in words; p decides once it is corrected for the pairs of the table."""
    summary, q = comparison.difference.summary, comparison.q
    interval, reading = "", "no difference shown"
    if summary.low is not None and summary.high is not None:
        interval = f", 95 % CI [{summary.low:+.2f}, {summary.high:+.2f}]"
    if q is not None and q <= LEVEL:
        closer = comparison.first if summary.mean < 0 else comparison.second
        reading = f"{closer} is closer to {'its goals' if board.rule.goals else 'Retrain'}"
    if alike(summary):
        reading = "the same to two decimals"
    pair = (comparison.first, comparison.second)
    if lost := [row.label for row in board.rows if row.label in pair and row.diverged]:
        reading = f"no reading, as {' and '.join(lost)} diverged on a seed"
    return (
        f"{board.rule.title} of {comparison.first} − {comparison.second}: {summary.mean:+.2f}"
        f"{interval}{'' if q is None else f', p {q:.2g}'}, n {summary.n}: {reading}."
    )
