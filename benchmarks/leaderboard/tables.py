"""Cells and rows of the leaderboard tables."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.leaderboard.board import BoardRow, Leaderboard
from benchmarks.leaderboard.sweep import short
from benchmarks.report.cells import _interval, _number, _percent, plain
from benchmarks.report.table import FLOOR

COMPACT_COLUMNS = 4
NEGLIGIBLE = 0.005
"""Differences of AG that two decimals do not show are none, however small their spread."""
MARKS: Mapping[str | None, str] = {"inside": "≈", "unclear": "?", "outside": "", None: ""}


def value_cell(row: BoardRow, name: str, digits: int = 1, *, spread: bool = True) -> str:
    """``97.0±0.9 +0.5``: mean, spread and signed gap."""
    summary = row.metrics.get(name)
    if summary is None:
        return "–"
    text = f"{summary.mean:.{digits}f}"
    if spread and summary.std is not None:
        text += f"±{summary.std:.{digits}f}"
    gap = row.gaps.get(name)
    if gap is not None and not (row.method == "retrain" and row.label != FLOOR):
        text += f" {gap.mean:+.{digits}f}"
    return text


def derived_cell(row: BoardRow, name: str, digits: int = 2) -> str:
    """``1.43±0.43``."""
    summary = row.derived.get(name)
    return "–" if summary is None else plain(summary, digits)


def mean_cell(row: BoardRow, name: str, digits: int) -> str:
    """The mean alone; spreads are in the JSON."""
    summary = row.derived.get(name)
    return "–" if summary is None else f"{summary.mean:.{digits}f}"


def status_cell(row: BoardRow, planned: int) -> str:
    """n, and how many of them diverged."""
    if row.inapplicable:
        return "n/a"
    text = f"{len(row.seeds)}" if len(row.seeds) == planned else f"{len(row.seeds)}/{planned}"
    return text + (f" ({len(row.diverged)} diverged)" if row.diverged else "")


def main_columns(board: Leaderboard, *, compact: bool = False) -> list[str]:
    """Heads of the main table; ``compact`` fits 80 columns."""
    specs = [board.specs[name] for name in _columns(board, compact=compact)]
    titles = [f"{spec.title} {spec.arrow[0]}" for spec in specs]
    if compact:
        return ["method", *titles, f"{board.rule.title} ↓"]
    heads = ["method", "n", *titles, f"{board.rule.title} ↓", ""]
    heads += [column.title for column in board.rule.also]
    return heads + (["trials"] if board.trials else [])


def _columns(board: Leaderboard, *, compact: bool) -> list[str]:
    """Metrics of the main table; where there are too many, the compact one keeps the rule's."""
    names = list(board.suite.spec.columns)
    if compact and len(names) > COMPACT_COLUMNS:
        names = [name for name in names if name in board.rule.compact] or names
    return names[:COMPACT_COLUMNS] if compact else names


def main_rows(board: Leaderboard, *, compact: bool = False) -> list[list[str]]:
    """Cells of the main table."""
    return [
        _compact_cells(board, row) if compact else _full_cells(board, row) for row in board.rows
    ]


def _compact_cells(board: Leaderboard, row: BoardRow) -> list[str]:
    names = _columns(board, compact=True)
    cells = [_short_value_cell(row, name, board.specs[name].digits) for name in names]
    ag = row.derived.get("ag")
    text = "–" if ag is None else f"{ag.mean:.{2 if ag.mean < 10 else 1}f}"
    text += f" {MARKS[row.separability] or ' '}"
    if any(other.diverged for other in board.rows):
        text += f" ✗{len(row.diverged)}" if row.diverged else "   "
    return [row.label, *cells, text]


def _short_value_cell(row: BoardRow, name: str, digits: int) -> str:
    """``97.0 +0.5`` in at most ten characters."""
    text = value_cell(row, name, digits, spread=False)
    gap = row.gaps.get(name)
    value, space, _ = text.partition(" ")
    return f"{value} {gap.mean:+.0f}" if space and gap and abs(gap.mean) >= 9.95 else text


def _full_cells(board: Leaderboard, row: BoardRow) -> list[str]:
    cells = [row.label, status_cell(row, len(board.suite.spec.seeds))]
    names = board.suite.spec.columns
    cells += [value_cell(row, name, board.specs[name].digits) for name in names]
    cells += [derived_cell(row, "ag"), MARKS[row.separability]]
    cells += [mean_cell(row, column.name, column.digits) for column in board.rule.also]
    return cells + ([str(row.trials or "–")] if board.trials else [])


BOUND_COLUMNS = [
    "method",
    "‖dW‖/‖W0‖",
    "max |arg|",
    "bound active",
    "logit spread",
    "forget loss",
    "trained %",
    "seconds",
    "chosen by tuning",
]


def bound_rows(board: Leaderboard) -> list[list[str]]:
    """Cells of the second table: did the bound act, and what did a row cost?"""
    rows = []
    for row in board.rows:
        dynamics, cost = row.dynamics, row.cost
        loss = row.metrics.get("forget_loss")
        base, trained = cost.get("base_parameters"), cost.get("trainable_parameters")
        rows.append(
            [
                row.label,
                _number(dynamics.get("last/adapter/delta_ratio"), 3),
                _number(dynamics.get("last/adapter/max_argument"), 3),
                _percent(dynamics.get("last/adapter/bound_active")),
                _number(dynamics.get("last/logits/spread"), 2),
                "–" if loss is None else plain(loss),
                "–" if not base or trained is None else f"{100 * trained / base:.2f}",
                _number(cost.get("seconds"), 1),
                ", ".join(f"{key}={short(value)}" for key, value in row.chosen.items()) or "–",
            ]
        )
    return rows


def gap_table(board: Leaderboard) -> tuple[list[str], list[list[str]]]:
    """Signed gaps and AG with their 95 % t-intervals: heads and rows."""
    names = list(board.suite.spec.columns)
    heads = ["method", *[f"{board.specs[name].title} gap" for name in names], board.rule.title]
    rows = []
    for row in board.rows:
        cells = [_interval(row.gaps.get(name), f"+.{board.specs[name].digits}f") for name in names]
        rows.append([row.label, *cells, _interval(row.derived.get("ag"), ".2f")])
    return heads, rows


def further_table(board: Leaderboard) -> tuple[list[str], list[list[str]]]:
    """What was measured beside the main columns: heads and rows."""
    names = [name for name in board.specs if name not in board.suite.spec.columns]
    names = [name for name in names if any(name in row.metrics for row in board.rows)]
    heads = ["method", *[board.specs[name].title for name in names]]
    rows = []
    for row in board.rows:
        cells = [
            plain(row.metrics[n], board.specs[n].digits) if n in row.metrics else "–" for n in names
        ]
        rows.append([row.label, *cells])
    return heads, rows
