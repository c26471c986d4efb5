"""Scalability and sustainability: metrics over the folds of a suite, as tables and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.audits.stored import StoredPlan
from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard
from stable_forgetting.benchmarks.pipeline.measuring import read_split
from stable_forgetting.benchmarks.report.cells import MISSING, spread
from stable_forgetting.benchmarks.report.curves import Panel, draw
from stable_forgetting.benchmarks.report.section import Picture, Section, Table, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES
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
    drawn = _picture(board, folds.kind)
    head = Section(folds.kind.capitalize(), (text,), drawn)
    return [head, *(_table(board, name) for name in _measured(board))]


def to_json(board: Leaderboard) -> dict[str, Any]:
    """Row -> metric -> mean of every fold."""
    assert board.suite.spec.folds is not None
    numbers = range(1, len(_boards(board)) + 1)
    lines = {
        label: {name: _line(board, label, name) for name in _measured(board)}
        for label, _ in _labels(board)
    }
    return {
        "kind": board.suite.spec.folds.kind,
        "forgotten": list(board.forgotten),
        "rows": {
            label: {name: [line.get(number) for number in numbers] for name, line in own.items()}
            for label, own in lines.items()
        },
    }


def _boards(board: Leaderboard) -> list[Leaderboard]:
    return [*board.folds, board]


def _labels(board: Leaderboard) -> list[tuple[str, str]]:
    """(label, method) of the rows that were measured on some fold, in the suite's order."""
    measured = {row.label for fold in _boards(board) for row in fold.rows if row.seeds}
    return [(row.label, row.method) for row in board.suite.rows if row.label in measured]


def _measured(board: Leaderboard) -> list[str]:
    """Columns that some fold has, and the distance that orders the table."""
    rows = [row for fold in _boards(board) for row in fold.rows]
    names = [name for name in board.suite.spec.columns if any(name in r.metrics for r in rows)]
    return [*names, *([TOGETHER] if any(TOGETHER in row.derived for row in rows) else [])]


def _title(board: Leaderboard, name: str) -> str:
    return board.rule.title if name == TOGETHER else board.specs[name].title


def _rows(board: Leaderboard, label: str) -> Iterator[BoardRow | None]:
    """A row at every fold."""
    for fold in _boards(board):
        yield next((row for row in fold.rows if row.label == label != FLOOR), None)


def _summaries(board: Leaderboard, label: str, name: str) -> list[Summary | None]:
    return [
        None if row is None else (row.metrics | row.derived).get(name)
        for row in _rows(board, label)
    ]


def _table(board: Leaderboard, name: str) -> Section:
    digits = 2 if name == TOGETHER else board.specs[name].digits
    heads = ["method", *(f"fold {number + 1}" for number in range(len(_boards(board))))]
    rows = []
    for label, _ in _labels(board):
        cells = []
        for row, summary in zip(_rows(board, label), _summaries(board, label, name), strict=True):
            lost = f" ✗{len(row.diverged)}" if row is not None and row.diverged else ""
            cells.append(spread(summary, digits) + lost)
        rows.append([label, *cells])
    content: Table = table(heads, rows)
    return Section(f"{_title(board, name)} by fold", content=content, depth=3)


def _picture(board: Leaderboard, kind: str) -> Picture | None:
    labels = _labels(board)
    methods = [label for label, method in labels if method not in REFERENCES]
    panels = []
    for name in _measured(board):
        lines = {label: _line(board, label, name) for label, _ in labels}
        references = {
            DASHES[method]: lines[label] for label, method in labels if method in REFERENCES
        }
        panel = Panel(
            _title(board, name),
            {label: lines[label] for label in methods if lines[label]},
            (1, len(_boards(board))),
            f"fold {len(_boards(board))}",
            {dashes: line for dashes, line in references.items() if line},
        )
        if panel.lines or panel.references:
            panels.append(panel)
    if not panels:
        return None
    title = f"{board.suite.name}: {kind} (mean of seeds; dashed: Retrain, dotted: Original)"
    return Picture(draw(panels, methods, title), title, PICTURE)


def _line(board: Leaderboard, label: str, name: str) -> dict[int, float]:
    """Fold from 1 on -> mean, where it was measured."""
    summaries = enumerate(_summaries(board, label, name), 1)
    return {number: summary.mean for number, summary in summaries if summary is not None}
