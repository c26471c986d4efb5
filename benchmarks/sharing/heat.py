"""The picture of all tables at once: one coloured cell per row and suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture

SHADES = ("#b7e1c0", "#dcefc8", "#fbeec1", "#f6cfa4", "#eba9a0")
"""From what is nearest to a retrained model to what is farthest."""
INK = "#1c1c1c"
CELL, LEFT = (32, 20), 160
HEAD, LETTER = 60, 5.2
"""Pixels above the names of suites, which are slanted, and of a letter of these, up and across."""
LEAST_SUITES = 3
"""A row stands in the picture from so many suites on."""


@dataclass(frozen=True)
class Cell:
    """One row of one suite.

    Attributes:
        value: What colours it, and orders the rows.
        said: What it shows when it is pointed at.
        place: Address of what is said of it; empty for none.
    """

    value: float
    shown: str
    said: str
    place: str = ""


Cells = Mapping[str, Mapping[str, Cell]]
"""Row -> suite -> cell."""


def ordered(cells: Cells) -> list[str]:
    """Rows of enough suites, the smallest median first."""
    rows = [row for row in cells if len(cells[row]) >= LEAST_SUITES]
    return sorted(rows, key=lambda row: median(cell.value for cell in cells[row].values()))


def picture(
    cells: Cells,
    suites: Mapping[str, str],
    limits: Sequence[float],
    links: Mapping[str, str] = MappingProxyType({}),
    *,
    title: str,
    subtitle: str,
) -> Picture:
    """The table as coloured cells.

    Args:
        suites: Column -> what it is, in their order.
        limits: Up to which value each of :data:`SHADES` but the last goes.
        links: Row -> page of the method, suite -> its page.
    """
    rows = ordered(cells)
    slanted = LETTER * max(map(len, suites), default=0)
    top = HEAD + slanted
    body = [
        _link(links.get(suite, ""), _head(suite, place, top), svg.tip(f"{suite}: {about}"))
        for place, (suite, about) in enumerate(suites.items())
    ]
    for line, row in enumerate(rows):
        y = top + line * CELL[1]
        body.append(_link(links.get(row, ""), svg.text(LEFT - 8, y + 14, row, text_anchor="end")))
        body += [
            _cell(cells[row][suite], limits, LEFT + place * CELL[0], y)
            for place, suite in enumerate(suites)
            if suite in cells[row]
        ]
    bottom = top + len(rows) * CELL[1] + 14
    body += _legend(limits, bottom)
    width = LEFT + max(len(suites) * CELL[0] + slanted, 100 * len(SHADES))
    drawn = svg.picture(width, bottom + 30, body, title=title, subtitle=subtitle)
    return Picture(drawn, title)


def _head(suite: str, place: int, top: float) -> str:
    x, y = LEFT + place * CELL[0] + CELL[0] / 2 + 4, top - 6
    return svg.text(x, y, suite, transform=f"rotate(-45 {x:g} {y:g})")


def _cell(cell: Cell, limits: Sequence[float], x: float, y: float) -> str:
    size = {"width": CELL[0] - 2, "height": CELL[1] - 2}
    shade = SHADES[sum(cell.value > limit for limit in limits)]
    box = svg.element("rect", x=x, y=y, **size, fill=shade, class_="c")
    words = svg.text(x + CELL[0] / 2 - 1, y + 13, cell.shown, text_anchor="middle", fill=INK)
    return _link(cell.place, box, words, svg.tip(cell.said))


def _link(address: str, *content: str) -> str:
    return svg.element("a", *content, href=address) if address else svg.element("g", *content)


def _legend(limits: Sequence[float], y: float) -> list[str]:
    names = [f"up to {limit:g}" for limit in limits] + [f"above {limits[-1]:g}"]
    parts = []
    for place, (name, shade) in enumerate(zip(names, SHADES, strict=True)):
        x = LEFT + place * 100
        parts.append(svg.element("rect", x=x, y=y, width=14, height=14, fill=shade))
        parts.append(svg.text(x + 20, y + 12, name))
    return parts
