"""Rows of text -> a table on a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

if TYPE_CHECKING:
    from rich.table import Table

FLOOR = "retrain (second)"
"""The row of the second Retrain."""


def rich_table(
    title: str | None, heads: Sequence[str], rows: Sequence[Sequence[str]], *, tight: bool = False
) -> Table:
    """A Rich table: first column left, the rest right; ``tight`` for narrow terminals."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=escape(title) if title else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        padding=(0, 1, 0, 0) if tight else (0, 1),
        show_edge=not tight,
        pad_edge=False,
    )
    for index, head in enumerate(heads):
        table.add_column(escape(head), justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        style = "green" if row[0] == "retrain" else "dim" if row[0] in ("original", FLOOR) else None
        table.add_row(*map(escape, row), style=style)
    return table


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|---" + "|---:" * (len(heads) - 1) + "|"
    return "\n".join([line(heads), rule, *map(line, rows)])


def left(table: Any) -> Any:
    """The same table with every column left-aligned and wrapping."""
    for column in table.columns:
        column.justify, column.no_wrap = "left", False
    return table
