"""The tables of a leaderboard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard, info_of
from stable_forgetting.benchmarks.leaderboard.settings import place_of
from stable_forgetting.benchmarks.report.cells import (
    MISSING,
    interval,
    number,
    percent,
    significant,
    spread,
)
from stable_forgetting.benchmarks.report.section import Column, Mark, Table, table
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.verdict import MARGIN, Word

NARROW_COLUMNS = 4
DISTANCE = "is the distance that orders the rows"
SOME_DIVERGED = "counts the seeds; those that diverged are in no mean"
CRITERIA = (
    "says whether a rule holds, or which of its criteria fail (a single one: on how many seeds)"
)
MARKS: Mapping[Word, str] = {
    "different": "≠",
    "indistinguishable": "≈",
    "undecided": "?",
    "untested": "",
}
FACTOR = f"{math.exp(MARGIN):g}"
NOTES = {
    "≠": "different from a retrained model",
    "≈": f"indistinguishable from one: averages and answers within {FACTOR} times its distance",
    "?": "undecided",
}
"""Mark of a verdict -> its meaning."""
READING = " (our reading)"
"""After the label of a row whose method is only our reading of its source."""


def main_table(board: Leaderboard) -> Table:
    """The suite's columns, AG, distances by sample, and what else the benchmark's rule derives."""
    rule, columns = board.rule, board.suite.spec.columns
    answers = [n for n in columns if n in BENCHMARKS[board.suite.spec.benchmark].answer_metrics]
    names = [name for name in columns if name not in answers]
    diverged = any(row.diverged for row in board.rows)
    seeds = Column("n", doc=SOME_DIVERGED) if diverged else "n"
    heads: list[str | Column] = ["method", seeds, *_metric_heads(board, names)]
    weighted = "is the weighted mean |gap| over"
    heads += [
        Column(f"{axis.title} ↓", doc=f"{weighted} {', '.join(axis.weights)}") for axis in rule.axes
    ]
    heads += [Column(f"{rule.title} ↓", doc=DISTANCE), Column("", "mark")]
    ranked = any(row.rank for row in board.rows)
    heads += ["rank"] if ranked else []
    heads += _metric_heads(board, answers)
    worst = any(row.worst for row in board.rows)
    heads += ["worst"] if worst else []
    attacked = {row.label: f"{row.after.mean:.1f} {row.attack}" for row in board.attacked}
    heads += ["worst attack"] if attacked else []
    heads += ["reached", "steps"] if rule.goals else []
    heads += [Column(name, doc=CRITERIA) for name in board.suite.spec.rules]
    heads += [Column(column.title, doc=column.doc) for column in rule.also]
    rows = []
    for row in board.rows:
        cells = [_name(row), status_cell(row, len(board.suite.spec.seeds))]
        cells += [value_cell(row, name, board.specs[name].digits) for name in names]
        cells += [spread(row.derived.get(axis.name)) for axis in rule.axes]
        cells += [spread(row.derived.get("ag")), _mark(row)]
        cells += [_rank_cell(row)] if ranked else []
        cells += [spread(row.metrics.get(name), board.specs[name].digits) for name in answers]
        cells += [_worst_cell(board, row)] if worst else []
        cells += [attacked.get(row.label, MISSING)] if attacked else []
        cells += [_reached_cell(row), _steps_cell(row)] if rule.goals else []
        cells += [_criteria_cell(row, name) for name in board.suite.spec.rules]
        cells += [_mean(row, column.name, column.digits) for column in rule.also]
        rows.append(cells + ([str(row.trials or MISSING)] if board.trials else []))
    heads += ["trials"] if board.trials else []
    marked = any(row.verdict and MARKS[row.verdict.word] for row in board.rows)
    notes = NOTES if marked else {}
    narrow, marks = narrow_table(board), reference_marks(board)
    own = {label for label, _ in board.records}
    links = {_name(row): f"#{place_of(row.label)}" for row in board.rows if row.label in own}
    narrow = replace(narrow, notes=notes)
    return table(heads, rows, narrow=narrow, marks=marks, notes=notes, links=links)


def _name(row: BoardRow) -> str:
    """The label, and whether the method is only our reading of its source."""
    info = info_of(row.method)
    return f"{row.label}{READING}" if info and info.reading else row.label


def _reached_cell(row: BoardRow) -> str:
    """``2/3``: seeds that reach every goal."""
    if not row.reached or None in row.reached.values():
        return MISSING
    return f"{sum(answer is True for answer in row.reached.values())}/{len(row.seeds)}"


def _mark(row: BoardRow) -> str:
    return MARKS[row.verdict.word] if row.verdict else ""


def _rank_cell(row: BoardRow) -> str:
    """``3 [2, 6]``: rank and its interval; the rank alone where one seed gives none."""
    if row.rank is None:
        return MISSING
    ends = f" [{row.rank.low}, {row.rank.high}]" if len(row.ag_per_seed) > 1 else ""
    return f"{row.rank.rank}{ends}"


def _worst_cell(board: Leaderboard, row: BoardRow) -> str:
    """``12.3 MIA``: how many times as far as the second Retrain, and in which column."""
    if row.worst is None:
        return MISSING
    return f"{significant(row.worst.ratio)} {board.specs[row.worst.metric].title}"


def _steps_cell(row: BoardRow) -> str:
    """Mean optimizer steps of unlearning, which may have ended at the goals."""
    return MISSING if row.method in REFERENCES else number(row.cost.get("steps"), 1)


def _criteria_cell(row: BoardRow, name: str) -> str:
    """``pass``, or what fails on some seed; of one criterion on how many; unknown where one is."""
    seeds = row.criteria.get(name, {}).values()
    failed = Counter(
        rule for criteria in seeds for rule, holds in criteria.items() if holds is False
    )
    if failed:
        count = f" {failed.total()}/{len(seeds)}" if len(failed) == 1 else ""
        return f"fails {', '.join(sorted(failed))}{count}"
    passes = all(holds is True for criteria in seeds for holds in criteria.values())
    return "pass" if seeds and passes and not row.diverged else MISSING


def narrow_table(board: Leaderboard) -> Table:
    """The main table in 80 characters: means, gaps, AG.

    Where the suite has too many columns, those that the gap rule calls compact stay.
    """
    names = list(board.suite.spec.columns)
    if len(names) > NARROW_COLUMNS:
        names = [name for name in names if name in board.rule.compact] or names
    names = names[:NARROW_COLUMNS]
    diverged = any(row.diverged for row in board.rows)
    rows = []
    for row in board.rows:
        cells = [_narrow_value_cell(row, name, board.specs[name].digits) for name in names]
        rows.append([_name(row), *cells, _narrow_ag_cell(row, diverged=diverged)])
    lost = "; it ends in ✗n where n of the row's seeds diverged, which are in no mean"
    means = "; narrow terminals get means alone, and the report's files the spreads"
    ag = Column(f"{board.rule.title} ↓", doc=DISTANCE + means + lost * diverged)
    return table(["method", *_metric_heads(board, names), ag], rows, marks=reference_marks(board))


def _metric_heads(board: Leaderboard, names: Sequence[str]) -> list[Column]:
    specs = [board.specs[name] for name in names]
    return [Column(f"{spec.title} {spec.arrow[0]}", doc=f"is {spec.doc}") for spec in specs]


def reference_marks(board: Leaderboard) -> dict[str, Mark]:
    """Row label -> how a reference row stands out."""
    references = [row for row in board.rows if row.method in REFERENCES]
    return {row.label: "goal" if row.target else "reference" for row in references}


def value_cell(row: BoardRow, name: str, digits: int = 1, *, with_spread: bool = True) -> str:
    """``97.0±0.9 +0.5``: mean, spread and signed gap."""
    summary = row.metrics.get(name)
    if summary is None:
        return MISSING
    text = spread(summary, digits) if with_spread else number(summary.mean, digits)
    gap = row.gaps.get(name)
    if gap is not None and not row.target:
        text += f" {gap.mean:+.{digits}f}"
    return text


def _narrow_value_cell(row: BoardRow, name: str, digits: int) -> str:
    """``97.0 +0.5`` in at most ten characters."""
    text = value_cell(row, name, digits, with_spread=False)
    gap = row.gaps.get(name)
    value, space, _ = text.partition(" ")
    return f"{value} {gap.mean:+.0f}" if space and gap and abs(gap.mean) >= 9.95 else text


def _narrow_ag_cell(row: BoardRow, *, diverged: bool) -> str:
    ag = row.derived.get("ag")
    text = MISSING if ag is None else number(ag.mean, 2 if ag.mean < 10 else 1)
    text += f" {_mark(row) or ' '}"
    if diverged:
        text += f" ✗{len(row.diverged)}" if row.diverged else "   "
    return text


def _mean(row: BoardRow, name: str, digits: int) -> str:
    """The mean alone; spreads are in the JSON."""
    summary = row.derived.get(name)
    return number(None if summary is None else summary.mean, digits)


def status_cell(row: BoardRow, planned: int) -> str:
    """n, and how many of them diverged."""
    if row.inapplicable:
        return "n/a"
    text = f"{len(row.seeds)}" if len(row.seeds) == planned else f"{len(row.seeds)}/{planned}"
    return text + (f" ({len(row.diverged)} diverged)" if row.diverged else "")


def gap_table(board: Leaderboard) -> Table:
    """Signed gaps and AG with their 95 % t-intervals; the distance alone without a Retrain."""
    names = [name for name in board.suite.spec.columns if any(name in r.gaps for r in board.rows)]
    heads: list[str | Column] = ["method"]
    for title in (board.specs[name].title for name in names):
        heads.append(Column(f"{title} gap", doc=f"is {title} less that of the seed's Retrain"))
    heads.append(Column(board.rule.title, doc=DISTANCE))
    rows = []
    for row in board.rows:
        cells = [interval(row.gaps.get(name), f"+.{board.specs[name].digits}f") for name in names]
        rows.append([row.label, *cells, interval(row.derived.get("ag"), ".2f")])
    return table(heads, rows, marks=reference_marks(board))


LOGGED: Mapping[str, tuple[str, Callable[[float | None], str]]] = {
    "last/adapter/delta_ratio": ("‖dW‖/‖W0‖", partial(number, digits=3)),
    "last/adapter/max_argument": ("max |arg|", partial(number, digits=3)),
    "last/adapter/bound_active": ("bound active", percent),
    "last/logits/spread": ("logit spread", partial(number, digits=2)),
}
"""What trainings log of adapters and logits: name in a record's dynamics -> column, format."""


def dynamics_table(board: Leaderboard) -> Table:
    """What the trainings of these rows logged; no rows where they logged nothing of it."""
    names = [name for name in LOGGED if any(name in row.dynamics for row in board.rows)]
    rows = [
        [row.label, *[LOGGED[name][1](row.dynamics.get(name)) for name in names]]
        for row in board.rows
        if names
    ]
    return table(
        ["method", *[LOGGED[name][0] for name in names]], rows, marks=reference_marks(board)
    )


SPENT = {"retain_passes": 1, "retain_samples": 0, "forget_samples": 0, "steps": 0, "seconds": 1}
"""Cost entries of a record that are printed -> digits."""


def cost_table(board: Leaderboard) -> Table:
    """What every row read and trained, and for how long."""
    rows = []
    for row in board.rows:
        base = row.cost.get("base_parameters")
        trained = row.cost.get("trainable_parameters")
        share = None if not base or trained is None else 100 * trained / base
        cells = [number(row.cost.get(name), digits) for name, digits in SPENT.items()]
        rows.append([row.label, *cells, number(share, 2)])
    heads = ["retain passes", "retain samples", "forget samples", "steps", "seconds", "trained %"]
    return table(["method", *heads], rows, marks=reference_marks(board))


def further_table(board: Leaderboard) -> Table:
    """What was measured beside the main columns; no rows where nothing was."""
    names = [name for name in board.specs if name not in board.suite.spec.columns]
    names = [name for name in names if any(name in row.metrics for row in board.rows)]
    rows = [
        [row.label, *[spread(row.metrics.get(name), board.specs[name].digits) for name in names]]
        for row in board.rows
        if names
    ]
    heads: list[str | Column] = ["method", *_metric_heads(board, names)]
    return table(heads, rows, marks=reference_marks(board))
