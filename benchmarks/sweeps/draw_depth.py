"""The picture of width against depth: one panel per quantity, one line per activation and loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.sweeps.board import Sweep
from stable_forgetting.benchmarks.sweeps.depth import (
    ABSOLUTE,
    FREE,
    Panel,
    Place,
    lines_of,
    order,
    panels,
    place_text,
)

PANEL, LEFT, GAP, HEAD = (222, 190), 46, 26, 74
"""Three panels fill the some 830 pixels of a page of documents."""
LEGEND, SAMPLE, LETTER, WIDTH = 20, 32, 6.2, 600
"""Of the legend: its rows, a line's sample, a letter; and the least width of the picture."""
COLOURS = ("#30638e", "#d1495b", "#00798c", "#8a5a00", "#6a4c93", "#444444")
DASHES = {"ascent": "5 3", "saturating loss": None}
NEAR = 24
"""Pixels below which two names of sizes would touch."""


def depth_picture(board: Sweep) -> Picture | None:
    """None for a sweep that does not try several sizes of a bound, or has no cell yet."""
    lines, shown = lines_of(board.suite), panels(board)
    if not lines or not board.lines:
        return None
    places = sorted({place for points in lines.values() for place, _ in points}, key=order)
    across = columns(places)
    shapes = dict.fromkeys(name.partition(",")[0] for name in lines)
    colours = dict(zip(shapes, itertools.cycle(COLOURS), strict=False))
    body = []
    for index, panel in enumerate(shown):
        x = LEFT + index * (PANEL[0] + LEFT)
        body.append(_frame(panel, across, x))
        for name, points in lines.items():
            body.append(_line(panel, across, x, name, points, colours))
    bottom = HEAD + PANEL[1] + 46
    width = max(len(shown) * (PANEL[0] + LEFT) + GAP, WIDTH)
    entry = SAMPLE + max(map(len, lines)) * LETTER + GAP
    beside = max(1, int((width - LEFT) // entry))
    for index, name in enumerate(lines):
        row, column = divmod(index, beside)
        body.append(_entry(LEFT + column * entry, bottom + row * LEGEND, name, colours))
    rows = -(-len(lines) // beside)
    seeds = ", ".join(map(str, sorted(board.targets)))
    drawn = svg.picture(
        width,
        bottom + rows * LEGEND,
        body,
        title=f"{board.suite.name}: width against depth along c, seeds {seeds}",
        subtitle="x: size c of the bound, abs.: the paper's. Bars: least to most over seeds; "
        "hollow: cut off; grey: Retrain. No depth without an accepted cell.",
        left=GAP,
        font_size=11,
    )
    return Picture(drawn, "width against depth along c", "depth.svg")


def columns(places: Sequence[Place]) -> dict[Place, float]:
    """Size -> pixels from a panel's left: logarithmic, then half a decade each for the others."""
    sizes = [math.log10(place) for place in places if isinstance(place, float)]
    others = [place for place in places if not isinstance(place, float)]
    ends = {place: max(sizes) + 0.5 * (k + 1) for k, place in enumerate(others)}
    units: dict[Place, float] = {
        p: math.log10(p) if isinstance(p, float) else ends[p] for p in places
    }
    low, high = min(units.values()), max(units.values())
    return {p: 8 + (PANEL[0] - 16) * (unit - low) / (high - low) for p, unit in units.items()}


def _height(panel: Panel, value: float) -> float:
    return HEAD + PANEL[1] * (1 - min(value, panel.top) / panel.top)


def _frame(panel: Panel, across: Mapping[Place, float], x: float) -> str:
    bottom = HEAD + PANEL[1]
    parts = [svg.text(x, HEAD - 10, panel.title, font_weight="bold")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * PANEL[1]
        parts.append(svg.line((x, y), (x + PANEL[0], y), stroke="#ddd"))
        parts.append(svg.text(x - 5, y + 4, f"{share * panel.top:g}", text_anchor="end"))
    if panel.retrain is not None:
        y = _height(panel, panel.retrain)
        grey = {"stroke": svg.GREY, "stroke_width": 1.5, "stroke_dasharray": "2 3"}
        parts.append(svg.line((x, y), (x + PANEL[0], y), **grey))
    last = -math.inf
    for place, offset in across.items():
        named = offset - last >= NEAR or place == FREE
        if named:
            parts.append(
                svg.text(
                    x + offset,
                    bottom + 14,
                    place_text(place).replace(ABSOLUTE, "abs."),
                    text_anchor="middle",
                )
            )
            last = offset
        parts.append(svg.line((x + offset, bottom), (x + offset, bottom + 3), stroke=svg.GREY))
    parts.append(svg.text(x + PANEL[0] / 2, bottom + 28, "c", text_anchor="middle", fill=svg.GREY))
    return "".join(parts)


def _line(
    panel: Panel,
    across: Mapping[Place, float],
    x: float,
    name: str,
    points: Sequence[tuple[Place, str]],
    colours: Mapping[str, str],
) -> str:
    """Neighbours that both have a value are joined; one without leaves a gap."""
    style = _style(name, colours)
    parts: list[str] = []
    before: tuple[float, float] | None = None
    for place, label in points:
        values = panel.values.get(label)
        if not values:
            before = None
            continue
        middle = math.fsum(values) / len(values)
        here = x + across[place], _height(panel, middle)
        if before is not None:
            parts.append(svg.line(before, here, stroke_width=1.8, **style))
        ends = [(here[0], _height(panel, end)) for end in (min(values), max(values))]
        parts.append(svg.line(*ends, stroke=style["stroke"], stroke_width=1))
        each = ", ".join(f"{value:g}" for value in values)
        note = f"{label}, c {place_text(place)}: {middle:.1f} ({each})"
        fill = "white" if label in panel.cut else style["stroke"]
        circle = {"cx": here[0], "cy": here[1], "r": 3.5, "fill": fill, "stroke": style["stroke"]}
        parts.append(svg.element("circle", svg.tip(note), **circle))
        before = here
    return "".join(parts)


def _style(name: str, colours: Mapping[str, str]) -> dict[str, str | None]:
    shape, _, rest = name.partition(", ")
    return {"stroke": colours[shape], "stroke_dasharray": DASHES[rest.partition(" (")[0]]}


def _entry(x: float, y: float, name: str, colours: Mapping[str, str]) -> str:
    style = _style(name, colours)
    sample = svg.line((x, y - 4), (x + SAMPLE - 6, y - 4), stroke_width=1.8, **style)
    return sample + svg.text(x + SAMPLE, y, name)
