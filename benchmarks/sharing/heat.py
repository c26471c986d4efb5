"""The picture of all tables at once: a method's distance in units of the noise floor, by suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture

STEPS = ((1.0, "#b7e1c0"), (2.0, "#dcefc8"), (5.0, "#fbeec1"), (20.0, "#f6cfa4"))
"""Largest ratio -> colour, the nearest to a retrained model first."""
FAR = "#eba9a0"
INK = "#1c1c1c"
CELL, LEFT, TOP = (32, 20), 160, 170
LEAST_SUITES = 3
"""A row stands in the picture from so many suites on."""


@dataclass(frozen=True)
class Cell:
    """One row of one suite.

    Attributes:
        ratio: Its distance over the distance of a second Retrain, means over seeds.
        mark: Of its verdict.
        place: Address of what is said of it.
    """

    ratio: float
    mark: str
    place: str


Cells = Mapping[str, Mapping[str, Cell]]
"""Row -> suite -> cell."""


def ordered(cells: Cells) -> list[str]:
    """Rows of enough suites, the smallest median ratio first."""
    rows = [row for row in cells if len(cells[row]) >= LEAST_SUITES]
    return sorted(rows, key=lambda row: median(cell.ratio for cell in cells[row].values()))


def picture(
    cells: Cells, suites: Sequence[str], links: Mapping[str, str], titles: Mapping[str, str]
) -> Picture:
    """The table as coloured cells, each a link.

    Args:
        cells: By row and suite.
        suites: Columns, in their order.
        links: Row -> page of the method, suite -> its page.
        titles: Suite -> what it is.
    """
    rows = ordered(cells)
    body = [_head(suite, place, links[suite], titles[suite]) for place, suite in enumerate(suites)]
    for line, row in enumerate(rows):
        y = TOP + line * CELL[1]
        name = svg.text(LEFT - 8, y + 14, row, text_anchor="end")
        body.append(_link(links[row], name) if row in links else name)
        body += [
            _cell(row, suite, cells[row][suite], LEFT + place * CELL[0], y)
            for place, suite in enumerate(suites)
            if suite in cells[row]
        ]
    bottom = TOP + len(rows) * CELL[1] + 14
    body += _legend(bottom)
    title = "Distance to a retrained model, in units of a second retrained model's distance"
    width, height = LEFT + len(suites) * CELL[0] + 60, bottom + 30
    drawn = svg.picture(width, height, body, title=title, subtitle="every cell is a link")
    return Picture(drawn, title)


def _head(suite: str, place: int, address: str, title: str) -> str:
    x, y = LEFT + place * CELL[0] + CELL[0] / 2 + 4, TOP - 6
    turned = svg.text(x, y, suite, transform=f"rotate(-45 {x:g} {y:g})")
    return _link(address, turned, svg.tip(f"{suite}: {title}"))


def _cell(row: str, suite: str, cell: Cell, x: float, y: float) -> str:
    shown = f"{cell.ratio:.1f}" if cell.ratio < 10 else f"{min(cell.ratio, 9999):.0f}"
    said = f"{row} in {suite}: {cell.ratio:.2f} times the floor {cell.mark}".strip()
    box = svg.element(
        "rect", x=x, y=y, width=CELL[0] - 2, height=CELL[1] - 2, fill=colour(cell.ratio), class_="c"
    )
    words = svg.text(x + CELL[0] / 2 - 1, y + 13, shown, text_anchor="middle", fill=INK)
    return _link(cell.place, box, words, svg.tip(said))


def colour(ratio: float) -> str:
    """The colour of a ratio."""
    return next((shade for limit, shade in STEPS if ratio <= limit), FAR)


def _link(address: str, *content: str) -> str:
    return svg.element("a", *content, href=address)


def _legend(y: float) -> list[str]:
    names = [f"up to {limit:g}" for limit, _ in STEPS] + [f"above {STEPS[-1][0]:g}"]
    shades = [shade for _, shade in STEPS] + [FAR]
    parts = []
    for place, (name, shade) in enumerate(zip(names, shades, strict=True)):
        x = LEFT + place * 100
        parts.append(svg.element("rect", x=x, y=y, width=14, height=14, fill=shade))
        parts.append(svg.text(x + 20, y + 12, name))
    return parts
