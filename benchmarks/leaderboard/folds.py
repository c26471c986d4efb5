"""Scalability and sustainability: metrics over the folds of a suite, as tables and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.audits.stored import StoredPlan
from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard
from stable_forgetting.benchmarks.pipeline.measuring import read_split
from stable_forgetting.benchmarks.report.cells import MISSING, spread
from stable_forgetting.benchmarks.report.curves import Panel, draw
from stable_forgetting.benchmarks.report.section import Picture, Section, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.measure.gaps import Summary
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    import numpy as np

PICTURE = "folds.svg"
DASHES = {"retrain": "4", "original": "1 3"}
WORDS = {
    "scalability": "nested forget sets, each unlearned from Original",
    "sustainability": "disjoint forget sets in turn, each unlearned from what the row left before",
}
TOGETHER = "ag"


def forgotten(suite: ResolvedSuite, store: StageStore, plan: StoredPlan) -> tuple[int | None, ...]:
    """Forget samples of every fold at the first seed; None where its split is not made.

    Sets that are not nested, or not disjoint, as the suite says, are refused.
    """
    if suite.spec.folds is None:
        return ()
    folds = [*plan.folds, plan]
    counts: list[int | None] = []
    for seed in reversed(suite.spec.seeds):
        sets = [_forget(fold, store, seed) for fold in folds]
        _check(suite, sets)
        counts = [None if ids is None else len(ids) for ids in sets]
    return tuple(counts)


def _forget(plan: StoredPlan, store: StageStore, seed: int) -> np.ndarray | None:
    stage = next(r.stage.parents["split"] for r in plan.results if r.seed == seed)
    split = read_split(store, stage)
    return None if split is None else split.parts["forget"]


def _check(suite: ResolvedSuite, sets: Sequence[np.ndarray | None]) -> None:
    assert suite.spec.folds is not None
    nested = suite.spec.folds.kind == "scalability"
    made = [set(ids.tolist()) for ids in sets if ids is not None]
    earlier: set[int] = set()
    for number, (before, after) in enumerate(pairwise(made), 1):
        earlier |= before
        if (nested and not before < after) or (not nested and earlier & after):
            wanted = "hold fold" if nested else "share nothing with folds up to"
            raise DataError(
                f"{suite.name}: {suite.spec.folds.kind}: fold {number + 1} must {wanted} {number};"
                " change folds.protocols"
            )


Folds = Mapping[str, Sequence[BoardRow | None]]
"""Label of a row -> the row at every fold."""


def fold_sections(board: Leaderboard) -> list[Section]:
    """Curves, and a table per metric: rows over folds; nothing for a suite without folds."""
    folds = board.suite.spec.folds
    if folds is None:
        return []
    sizes = ", ".join(MISSING if size is None else str(size) for size in board.forgotten)
    text = (
        f"{WORDS[folds.kind].capitalize()}; forget samples: {sizes}. The tables above and below "
        "are of the last fold. ✗n: n of the row's seeds diverged, which are in no mean."
    )
    rows = _folds(board)
    head = Section(folds.kind.capitalize(), (text,), _picture(board, rows, folds.kind))
    return [head, *(_table(board, rows, name) for name in _measured(board, rows))]


def to_json(board: Leaderboard) -> dict[str, Any]:
    """Row -> metric -> mean of every fold."""
    assert board.suite.spec.folds is not None
    rows, numbers = _folds(board), range(1, len(board.folds) + 2)
    lines = {
        label: {n: _line(own, n) for n in _measured(board, rows)} for label, own in rows.items()
    }
    return {
        "kind": board.suite.spec.folds.kind,
        "forgotten": list(board.forgotten),
        "rows": {
            label: {name: [line.get(number) for number in numbers] for name, line in own.items()}
            for label, own in lines.items()
        },
    }


def _folds(board: Leaderboard) -> Folds:
    """The rows that were measured on some fold, in the suite's order."""
    of_folds = [{row.label: row for row in fold.rows} for fold in (*board.folds, board)]
    every = {row.label: [fold.get(row.label) for fold in of_folds] for row in board.suite.rows}
    return {label: rows for label, rows in every.items() if any(row and row.seeds for row in rows)}


def _measured(board: Leaderboard, rows: Folds) -> list[str]:
    """Columns that some fold has, and the distance that orders the table."""
    names = [*board.suite.spec.columns, TOGETHER]
    return [name for name in names if any(_line(own, name) for own in rows.values())]


def _line(rows: Sequence[BoardRow | None], name: str) -> dict[int, float]:
    """Fold from 1 on -> mean, where it was measured."""
    summaries = enumerate((_summary(row, name) for row in rows), 1)
    return {number: summary.mean for number, summary in summaries if summary is not None}


def _summary(row: BoardRow | None, name: str) -> Summary | None:
    return None if row is None else (row.metrics | row.derived).get(name)


def _title(board: Leaderboard, name: str) -> str:
    return board.rule.title if name == TOGETHER else board.specs[name].title


def _table(board: Leaderboard, rows: Folds, name: str) -> Section:
    digits = 2 if name == TOGETHER else board.specs[name].digits

    def cell(row: BoardRow | None) -> str:
        lost = f" ✗{len(row.diverged)}" if row is not None and row.diverged else ""
        return spread(_summary(row, name), digits) + lost

    heads = ["method", *(f"fold {number + 1}" for number in range(len(board.folds) + 1))]
    content = table(heads, [[label, *map(cell, own)] for label, own in rows.items()])
    return Section(f"{_title(board, name)} by fold", content=content, depth=3)


def _picture(board: Leaderboard, rows: Folds, kind: str) -> Picture | None:
    methods = {row.label: row.method for row in board.suite.rows if row.label in rows}
    drawn = [label for label, method in methods.items() if method not in REFERENCES]
    panels = []
    for name in _measured(board, rows):
        lines = {label: line for label, own in rows.items() if (line := _line(own, name))}
        panel = Panel(
            _title(board, name),
            {label: line for label, line in lines.items() if label in drawn},
            (1, len(board.folds) + 1),
            f"fold {len(board.folds) + 1}",
            {DASHES[methods[k]]: line for k, line in lines.items() if k not in drawn},
        )
        panels.append(panel)
    if not panels:
        return None
    title = f"{board.suite.name}: {kind} (mean of seeds; dashed: Retrain, dotted: Original)"
    return Picture(draw(panels, drawn, title), title, PICTURE)
