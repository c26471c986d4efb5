"""What reports say of verdicts: how they are made, and what the seeds can show."""

from __future__ import annotations

import math

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard
from stable_forgetting.benchmarks.leaderboard.tables import FACTOR, MARKS, reference_marks
from stable_forgetting.benchmarks.report.cells import MISSING, significant
from stable_forgetting.benchmarks.report.columns import DOCS
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.verdict import LEAST_SEEDS, LEVEL, Median, Verdict

ERROR = f"{100 * LEVEL:g} %"
ODD = "counts the seeds on which the row is furthest from the others, ties shared"
P = "is exact over all ways to name one model of every seed the row's"
Q = f"is p corrected for the methods (Benjamini and Hochberg); {LEVEL:g} or less is a difference"
RATIO = (
    "is the distance to the Retrains over that between them: the median over seeds and its "
    f"interval, each end of which errs in at most {ERROR}"
)
ANSWERS = "is the same ratio of the distances per sample"
EQUIVALENT = (
    f"is that of both ratios being {FACTOR} or more, corrected for the methods (Holm); {LEVEL:g} "
    "or less is indistinguishable"
)
NEEDED = "is the ratio that these seeds could have shown to be a difference, of an undecided row"


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
    columns = [Column("odd", doc=ODD), Column("p", doc=P), Column("q", doc=Q)]
    columns += [Column("ratio", doc=RATIO), Column("answers", doc=ANSWERS)]
    columns += [Column("p of ≈", doc=EQUIVALENT), Column("needed", doc=NEEDED)]
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
        MISSING if verdict.p_equivalent is None else significant(verdict.p_equivalent),
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


def _reach(rows: list[BoardRow], members: int) -> str:
    """What the seeds cannot show; empty where every row alone could be shown to differ."""
    n = max((row.verdict.n for row in rows if row.verdict), default=0)
    if n < LEAST_SEEDS:
        return f"{n} seeds are too few for verdicts, which take {LEAST_SEEDS}: there are no marks."
    nearest = 2.0**-n * len(rows)
    text = f"With {n} seeds no row of {len(rows)} can be shown to be indistinguishable. "
    text = "" if nearest <= LEVEL else text
    least = members**-n
    needed = math.ceil(least * len(rows) / LEVEL)
    if needed > 1:
        text += (
            f"p is {significant(least)} or more: rows are called different only if {needed} of "
            f"the {len(rows)} are odd on every seed."
        )
    return text.strip()
