"""The main table of a report as a paper prints it: chosen columns, named rows, the best bold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stable_forgetting.benchmarks.leaderboard.tables import READING
from stable_forgetting.benchmarks.report.section import Section, Table
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.config import check_known
from stable_forgetting.common.base.errors import ConfigError

ARROWS = "→↑↓"
_VALUE = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
_GAP = re.compile(r" ([+-]\d+(\.\d+)?)$")


def main_table(
    sections: Sequence[Section], columns: Sequence[str], names: Mapping[str, str], *, bold: bool
) -> list[Section]:
    """The main table of a report, and a caption without versions and digests.

    Args:
        columns: Heads in the order wanted, with or without arrow; all but marks where empty.
        names: Label of a row -> what the paper calls it.
        bold: Whether the best row of every column with an arrow is bold, references apart, and rows
            that diverged on a seed.
    """
    table = next((s.content for s in sections if isinstance(s.content, Table)), None)
    if table is None:
        raise ConfigError("--main: the report has no table")
    given = [place for place, column in enumerate(table.columns) if column.kind != "mark"]
    places = [0, *(_place(table, column) for column in columns)] if columns else given
    labels = {row[0]: row[0].removesuffix(READING) for row in table.rows}
    check_known("--main: no row", names, [*labels.values()])
    best = {place: _best(table, place) for place in places[1:]} if bold else {}
    counted = any(table.heads[place] == "n" for place in places)
    rows = []
    for row in table.rows:
        name = names.get(labels[row[0]], row[0])
        name = name if counted else f"{name} {_diverged(row)}".rstrip()
        rows.append((name, *(_cell(row, place, best) for place in places[1:])))
    heading = next((section.title for section in sections if section.title), "")
    title = next((text for section in sections for text in section.text), "")
    chosen = tuple(replace(table.columns[place], doc="") for place in places)
    short = replace(
        table, columns=chosen, rows=tuple(rows), notes={}, narrow=None, brief=None, links={}
    )
    return [Section(heading.partition(" (")[0], (title,), short)]


def _place(table: Table, name: str) -> int:
    heads, plain = [_plain(head) for head in table.heads if head], _plain(name)
    check_known("--main: no column", [plain], heads)
    return next(k for k, head in enumerate(table.heads) if _plain(head) == plain)


def _plain(head: str) -> str:
    return head.strip().rstrip(f" {ARROWS}").lower()


def _diverged(row: Sequence[str]) -> str:
    """``(1 diverged)``, from the cell that counts seeds; empty where none did."""
    return next((cell[cell.index("(") :] for cell in row if cell.endswith(" diverged)")), "")


def _cell(row: Sequence[str], place: int, best: Mapping[int, set[str]]) -> str:
    return f"**{row[place]}**" if row[0] in best.get(place, ()) else row[place]


def _best(table: Table, place: int) -> set[str]:
    """Rows with the best value as shown: by the arrow the smallest, largest, or nearest Retrain."""
    arrow = table.heads[place][-1:]
    if arrow not in tuple(ARROWS):
        return set()
    references = {*table.marks, *REFERENCES}  # a report that was read back has no marks
    methods = [
        row
        for row in table.rows
        if not references & {row[0], row[0].split(" ")[0]} and not _diverged(row)
    ]
    known = {row[0]: _cost(row[place], arrow) for row in methods}
    costs = {name: cost for name, cost in known.items() if cost is not None}
    return {name for name, cost in costs.items() if cost == min(costs.values())}


def _cost(cell: str, arrow: str) -> float | None:
    found = _GAP.search(cell) if arrow == "→" else _VALUE.search(cell)
    if found is None:
        return None
    value = float(found[1] if arrow == "→" else found[0])
    return {"→": abs(value), "↑": -value, "↓": value}[arrow]
