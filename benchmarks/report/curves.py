"""Pictures of several curves: one panel per quantity, one colour per name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stable_forgetting.benchmarks.report import svg

COLOURS = ("#1f4e9c", "#c0392b", "#1e8449", "#b7950b", "#7d3c98", "#117a65", "#a04000", "#515a5a")
PANEL, GAP, LEFT, TOP = (300, 170), 60, 50, 50
COLUMNS = 2
"""Panels beside each other: a page of documents is some 830 pixels wide."""
ABREAST, NAME = 4, 180
"""Names in a line below the panels, and pixels for each."""
MOST_POINTS = 40
"""Points of a curve that answer to a pointer one by one."""
Line = Mapping[int, float]
"""Place on the horizontal axis -> value."""


@dataclass(frozen=True)
class Panel:
    """Curves of one quantity.

    Attributes:
        lines: Name -> its curve; a name has one colour in every panel.
        ends: The first and the last place of the axis.
        axis: What stands under the last place.
        references: Dash pattern -> a grey curve.
        log: Whether the vertical axis is logarithmic; values that are not positive are left out.
    """

    title: str
    lines: Mapping[str, Line]
    ends: tuple[int, int]
    axis: str
    references: Mapping[str, Line] = field(default_factory=dict)
    log: bool = False


def draw(panels: Sequence[Panel], names: Sequence[str], title: str) -> str:
    """The panels, each with a line at least, and below them the names in order of their colours."""
    columns = min(COLUMNS, len(panels))
    pitch = PANEL[1] + GAP
    bottom = TOP + pitch * -(-len(panels) // columns) - 10
    styles = {name: _style(index) for index, name in enumerate(names)}
    body = [
        _panel(panel, styles, LEFT + (i % columns) * (PANEL[0] + GAP), TOP + i // columns * pitch)
        for i, panel in enumerate(panels)
    ]
    for index, name in enumerate(names):
        x, y = LEFT + NAME * (index % ABREAST), bottom + 18 * (index // ABREAST)
        body.append(svg.line((x, y - 4), (x + 24, y - 4), **styles[name]))
        body.append(svg.text(x + 30, y, name, fill=styles[name]["stroke"]))
    width, height = LEFT + COLUMNS * (PANEL[0] + GAP), bottom + 18 * -(-len(names) // ABREAST)
    return svg.picture(width, height, body, title=title)


def _style(index: int) -> dict[str, str]:
    """A colour, and dashes where the colours are used up."""
    dashes = {"stroke_dasharray": "7 2"} if index >= len(COLOURS) else {}
    return {"stroke": COLOURS[index % len(COLOURS)], **dashes}


def _panel(panel: Panel, styles: Mapping[str, Mapping[str, str]], left: int, top: int) -> str:
    every = [*panel.lines.values(), *panel.references.values()]
    values = [value for line in every for value in _shown(panel, line).values()]
    low, high = min(values), max(values)
    first, last = panel.ends
    right, bottom = left + PANEL[0], top + PANEL[1]
    scale = math.log10 if panel.log else float

    def at(place: int, value: float) -> tuple[float, float]:
        share = (scale(value) - scale(low)) / ((scale(high) - scale(low)) or 1.0)
        along = (place - first) / ((last - first) or 1)
        return left + PANEL[0] * along, bottom - PANEL[1] * share

    side = {"text_anchor": "end", "fill": svg.GREY, "font_size": 11}
    frame = {"x": left, "y": top, "width": PANEL[0], "height": PANEL[1]}
    parts = [
        svg.element("rect", **frame, fill="none", stroke="#ccc"),
        svg.text(left, top - 8, panel.title),
        svg.text(left - 4, top + 10, _narrow(high), **side),
        svg.text(left - 4, bottom, _narrow(low), **side),
        svg.text(right, bottom + 16, panel.axis, **side),
    ]
    for dashes, line in panel.references.items():
        points = [at(*point) for point in _shown(panel, line).items()]
        parts.append(svg.polyline(points, stroke="#888", stroke_dasharray=dashes))
    for name, line in panel.lines.items():
        points = [at(*point) for point in _shown(panel, line).items()]
        parts.append(svg.polyline(points, **styles[name]))
        parts += _points(name, _shown(panel, line), points, styles[name]["stroke"])
    return "".join(parts)


def _narrow(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


def _points(
    name: str, line: Line, points: Sequence[tuple[float, float]], colour: str
) -> Iterator[str]:
    """A dot per point that says its value; none on long curves."""
    if len(points) > MOST_POINTS:
        return
    for (place, value), (x, y) in zip(line.items(), points, strict=True):
        text = svg.tip(f"{name} at {place}: {value:.4g}")
        yield svg.element("circle", text, cx=x, cy=y, r=2.5, fill=colour)


def _shown(panel: Panel, line: Line) -> Line:
    return {place: v for place, v in line.items() if v > 0} if panel.log else line
