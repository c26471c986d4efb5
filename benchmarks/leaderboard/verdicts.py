"""Verdicts and ranks of a leaderboard's rows: what its seeds can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import (
    BoardRow,
    FinalRecords,
    Leaderboard,
    Rank,
    Trial,
)
from stable_forgetting.benchmarks.leaderboard.judge import label_of
from stable_forgetting.benchmarks.leaderboard.tables import FACTOR, MARKS, reference_marks
from stable_forgetting.benchmarks.report.cells import MISSING, significant
from stable_forgetting.benchmarks.report.columns import DOCS
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.measure.metric import Row
from stable_forgetting.common.measure.ranking import rank_intervals, ranks, shown
from stable_forgetting.common.measure.rules import Rule
from stable_forgetting.common.measure.verdict import (
    LEAST_SEEDS,
    LEVEL,
    Evidence,
    Median,
    Verdict,
    judge,
)

STEP = 1e-9
"""Distances below are rounding; the smallest one above is the resolution of a table."""


def second_of(metric: str) -> str:
    """The name of a distance to Retrain where it is taken to the second Retrain."""
    return f"{metric}_second"


def add_verdicts(
    rows: Sequence[BoardRow],
    suite: ResolvedSuite,
    rule: Rule,
    finals: FinalRecords,
    answers: Sequence[str] = (),
) -> None:
    """Judges the rows against the Retrains of their seeds.

    A row that diverged on a seed gets no verdict.  Methods are corrected for each other; Original
    is no guess among them and is judged by itself.

    Args:
        rows: Of the table; those of Retrains are left alone.
        suite: Whose rows they are.
        rule: What a distance is.
        finals: Records of all final models.
        answers: Metrics of the distance per sample to Retrain; the first is judged.
    """
    retrains = [finals.get((label_of(suite, "retrain"), k), {}) for k in range(suite.spec.retrains)]
    if len(retrains) < 2 or rule.goals:
        return
    seeds = [s for s in retrains[0] if all(s in by and by[s].status == "ok" for by in retrains)]
    groups: dict[bool, dict[str, list[list[Row]]]] = {}
    for row in rows:
        own = finals.get((row.label, 0), {})
        if row.method != "retrain" and not row.diverged:
            groups.setdefault(row.method in REFERENCES, {})[row.label] = [
                [record.metrics for record in (own[seed], *(by_seed[seed] for by_seed in retrains))]
                for seed in seeds
                if seed in own
            ]
    verdicts: dict[str, Verdict] = {}
    for group in groups.values():
        verdicts |= judge(_evidence(group, rule, answers))
    for row in rows:
        row.verdict = verdicts.get(row.label)


def _evidence(
    group: Mapping[str, Sequence[Sequence[Row]]], rule: Rule, answers: Sequence[str]
) -> dict[str, Evidence]:
    """Label -> distances between the members of every seed, where all of them are known."""
    averages = {
        label: matrices
        for label, members in group.items()
        if (matrices := _stacked([_distances(of_seed, rule) for of_seed in members])) is not None
    }
    steps = [m[m > STEP].min() for m in averages.values() if (m > STEP).any()]
    resolution = float(min(steps, default=1.0))
    return {
        label: Evidence(
            matrices,
            resolution,
            _stacked([_answers(of_seed, answers[0]) for of_seed in group[label]])
            if answers
            else None,
        )
        for label, matrices in averages.items()
    }


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


def add_ranks(rows: Sequence[BoardRow], trials: Sequence[Trial] = ()) -> None:
    """Ranks the methods by their mean distance, as far as they have every seed of the table.

    Args:
        rows: Of the table.
        trials: Of tuning, which other draws could have ended otherwise.
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
