"""Sections -> a terminal: the compact ones, each table as wide as the terminal allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table as RichTable

from stable_forgetting.benchmarks.report.section import Column, Section, Table

STYLES = {"plain": None, "muted": "dim", "warning": "yellow"}
WORD = 16
"""Characters of a word from which it may be broken."""
NAME = 40
"""Characters of what a table of words names its rows by, from which it wraps as well."""
MARKS = {"goal": "green", "reference": "dim"}


def show(console: Console, sections: Sequence[Section]) -> None:
    """Prints the compact sections: the table of a section first, then its text."""
    for section in sections:
        if section.level == "compact":
            _show(console, section)


def _show(console: Console, section: Section) -> None:
    style = STYLES[section.tone]
    content = section.content
    if section.title:
        console.print(f"\n[bold]{escape(section.title)}[/bold]")
    if isinstance(content, Table) and len(content.columns) > 1:
        content = content.brief or content
        for piece, tight in fitting(content, console):
            console.print(rich_table(piece, tight=tight))
            if piece.explanation:
                console.print(piece.explanation, style="dim", markup=False)
    for paragraph in filter(None, section.text):
        console.print(paragraph, style=style, markup=False)
    for line in section.lines:
        console.print(f"  {line}", style=style, markup=False)


def fitting(table: Table, console: Console) -> list[tuple[Table, bool]]:
    """(table, tight) of what fits the console: the whole, the narrow one, or its pieces.

    No label and no number is ever cut: where even a piece is too wide, its other columns wrap.
    """
    for candidate in (table, table.narrow):
        for tight in (False, True):
            if candidate is not None and _fits(candidate, console, tight=tight):
                return [(candidate, tight)]
    fitted = []
    for part in pieces(table.narrow or table, console.width):
        if not _fits(part, console, tight=True):
            first, *others = part.columns
            wrapping = (replace(column, kind="words") for column in others)
            part = replace(part, columns=(first, *wrapping))
        fitted.append((part, True))
    return fitted


def _fits(table: Table, console: Console, *, tight: bool) -> bool:
    if any(column.kind == "words" for column in table.columns):
        return sum(_widths(table)) <= console.width
    wide = console.options.update(max_width=100_000)
    return Measurement.get(console, wide, rich_table(table, tight=tight)).maximum <= console.width


def _widths(table: Table) -> list[int]:
    """The least characters of each column, its space beside it included."""
    cells = zip(table.columns, zip(table.heads, *table.rows, strict=True), strict=True)
    return [_least(column, index, texts) + 3 for index, (column, texts) in enumerate(cells)]


def _least(column: Column, index: int, texts: Sequence[str]) -> int:
    """The longest cell of a column that stays whole, else :data:`WORD`.

    Rich narrows the widest columns first, so that none gets narrower than this.
    """
    longest = max(map(len, texts))
    whole = NAME if index == 0 else WORD
    return longest if column.kind != "words" or longest <= whole else WORD


def rich_table(table: Table, *, tight: bool = False) -> RichTable:
    """A Rich table; ``tight`` for narrow terminals."""
    rich = RichTable(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if tight else (0, 1),
        show_edge=not tight,
        pad_edge=False,
    )
    for index, (column, width) in enumerate(zip(table.columns, _widths(table), strict=True)):
        rich.add_column(
            escape(column.head),
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.kind != "words" or (index == 0 and width - 3 > WORD),
            overflow="fold",
            min_width=width - 3 if column.kind == "words" else None,
        )
    for row in table.rows:
        mark = table.marks.get(row[0])
        rich.add_row(*map(escape, row), style=MARKS[mark] if mark else None)
    return rich


def pieces(table: Table, width: int) -> Iterator[Table]:
    """A table as several that fit a width of characters, each tight and with the first column."""
    widths = [width - 1 for width in _widths(table)]
    places: list[int] = []
    for place in range(1, len(widths)):
        if places and widths[0] + sum(widths[k] for k in places) + widths[place] > width:
            yield _columns(table, [0, *places])
            places = []
        places.append(place)
    yield _columns(table, [0, *places])


def _columns(table: Table, places: Sequence[int]) -> Table:
    """Some of the columns, with the notes on the marks in them."""
    rows = tuple(tuple(row[k] for k in places) for row in table.rows)
    cells = {cell for row in rows for cell in row}
    notes = {mark: meaning for mark, meaning in table.notes.items() if mark in cells}
    columns = tuple(table.columns[k] for k in places)
    return replace(table, columns=columns, rows=rows, notes=notes, narrow=None)
