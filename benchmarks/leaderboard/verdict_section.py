"""What reports say of verdicts: how they are made, what they rest on, what the seeds can tell."""

from __future__ import annotations

import math

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard
from stable_forgetting.benchmarks.leaderboard.tables import FACTOR, MARKS, reference_marks
from stable_forgetting.benchmarks.report.cells import significant
from stable_forgetting.benchmarks.report.columns import DOCS
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.verdict import LEVEL, Median, Verdict

ERROR = f"{100 * LEVEL:g} %"
ODD = "counts the seeds on which the row is furthest from the others, ties shared"
P = "is exact over all ways to name one model of every seed the row's"
Q = f"is p corrected for the methods (Benjamini and Hochberg); {LEVEL:g} or less is told"
RATIO = (
    "is the distance to the Retrains over that between them: the median over seeds and its "
    f"interval, each end of which errs in at most {ERROR}"
)
TOLD = "is the ratio from which on an unclear row would have been told"


def verdict_sections(board: Leaderboard) -> list[Section]:
    """The table behind the marks; none where nothing was judged."""
    rows = {row.label: row.verdict for row in board.rows if row.verdict}
    if not rows:
        return []
    retrains = board.suite.spec.retrains
    text = (
        f"The model of a row and {retrains} Retrains of its seed are compared; a row as good as a "
        f"Retrain is the odd one out on one seed of {retrains + 1}. Within {FACTOR} times a "
        "Retrain's distance is a row whose interval of the ratio ends below, which takes five "
        "seeds. Original is judged by itself; a row that diverged on a seed is not judged."
    )
    columns = [Column("odd", doc=ODD), Column("p", doc=P), Column("q", doc=Q)]
    columns += [Column("ratio", doc=RATIO), Column("told from", doc=TOLD)]
    content = table(
        ["method", Column("verdict", "label", DOCS["verdict"]), *columns],
        [[label, *_cells(verdict)] for label, verdict in rows.items()],
        marks=reference_marks(board),
    )
    methods = [row for row in board.rows if row.verdict and row.method not in REFERENCES]
    return [Section("Verdicts", (text, _reach(methods, retrains + 1)), content, level="full")]


def _cells(verdict: Verdict) -> list[str]:
    told_from = ""
    if verdict.word == "unclear":
        told_from = "none" if verdict.told_from is None else _factor(verdict.told_from)
    return [
        f"{MARKS[verdict.word]} {verdict.word}",
        f"{verdict.odd:.3g}/{verdict.n}",
        significant(verdict.p),
        significant(min(1.0, verdict.q)),
        _ratio(verdict.ratio),
        told_from,
    ]


def _ratio(ratio: Median) -> str:
    """``1.4 [0.9, 2.2]``; without an interval where there are too few seeds."""
    text = _factor(ratio.value)
    if ratio.low is None or ratio.high is None:
        return text
    return f"{text} [{_factor(ratio.low)}, {_factor(ratio.high)}]"


def _factor(log: float) -> str:
    return significant(math.exp(log))


def _reach(rows: list[BoardRow], members: int) -> str:
    """What the seeds cannot tell; empty where every row could be told by itself."""
    n = max((row.verdict.n for row in rows if row.verdict), default=0)
    least = members**-n
    needed = math.ceil(least * len(rows) / LEVEL)
    if needed <= 1:
        return ""
    start = f"With {n} seeds p is {significant(least)} or more: "
    if needed > len(rows):
        return f"{start}no row can be told from a Retrain."
    return f"{start}rows are told only where {needed} of the {len(rows)} are odd on every seed."
