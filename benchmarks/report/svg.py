"""Elements and the frame of every SVG picture."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

GREY = "#666"
LEFT, WIDTH, PITCH, HEAD = 190, 520, 22, 64
"""Of a picture with a row per line: room for labels, the axis, a row, the head."""
NEAR = 9
"""Pixels within which points share a label."""


def element(tag: str, *content: str, **attributes: object) -> str:
    """One element; ``stroke_width=2`` becomes ``stroke-width="2"``, ``class_`` class.

    None leaves one out.
    """
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{pairs}>{''.join(content)}</{tag}>" if content else f"<{tag}{pairs}/>"


def _value(value: object) -> str:
    return f"{round(value, 2):g}" if isinstance(value, float) else html.escape(str(value))


def tip(content: str) -> str:
    """What a pointer over the element around it is told."""
    return element("title", html.escape(content))


def hit(told: str, x: float, y: float, width: float, height: float) -> str:
    """An unseen box; a pointer over it is told something."""
    box = {"x": x, "y": y, "width": width, "height": height}
    return element("rect", tip(told), **box, fill="none", pointer_events="all", class_="hit")


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """Escaped text; ``text_anchor`` says which end is at ``x``."""
    return element("text", html.escape(content), x=x, y=y, **attributes)


def line(start: tuple[float, float], end: tuple[float, float], **attributes: object) -> str:
    """A line between two points."""
    return element("line", x1=start[0], x2=end[0], y1=start[1], y2=end[1], **attributes)


def polyline(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    """A line through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=places, fill="none", **attributes)


def root_ticks(ticks: Iterable[float], end: float, length: float, room: float) -> list[float]:
    """Of ticks above 0, from the largest, as many as have room on a square-root axis.

    The axis goes from 0 to ``end`` in ``length`` pixels, and ``room`` is that between two ticks.
    """
    kept: list[float] = []
    right = math.inf
    for tick in sorted(ticks, reverse=True):
        place = length * math.sqrt(tick / end)
        if tick <= end and right - place >= room <= place:
            kept.append(tick)
            right = place
    return kept


def grid(
    left: float,
    top: float,
    side: float,
    across: Iterable[tuple[str, float]],
    up: Iterable[tuple[str, float]],
) -> list[str]:
    """The lines of a square and what is written at them: texts with their places in x and in y."""
    style = {"fill": GREY, "font_size": 11}
    body = []
    for told, x in across:
        body.append(line((x, top), (x, top + side), stroke="#eee"))
        body.append(text(x, top + side + 14, told, text_anchor="middle", **style))
    for told, y in up:
        body.append(line((left, y), (left + side, y), stroke="#eee"))
        body.append(text(left - 6, y + 4, told, text_anchor="end", **style))
    return body


Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def numbered(
    points: Sequence[tuple[float, float]],
    inside: Box,
    others: Sequence[tuple[float, float]] = (),
) -> list[str]:
    """The numbers of points, from 1, beside them and clear of each other and of ``others``.

    Those at nearly one place share a label.  A label takes the nearest place that is free inside a
    box, and a thin line leads to it from where it is not beside its point.
    """
    groups: dict[tuple[float, float], list[int]] = {}
    for number, (x, y) in enumerate(points, 1):
        near = (place for place in groups if max(abs(place[0] - x), abs(place[1] - y)) < NEAR)
        groups.setdefault(next(near, (x, y)), []).append(number)
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in (*points, *others)]
    labels = []
    for (x, y), numbers in groups.items():
        told = _runs(numbers)
        width = 4 + sum(7 if letter.isdigit() else 4 for letter in told)
        boxes = list(_around(x, y, width))
        free = (b for b in boxes if _within(b, inside) and not any(_meet(b, own) for own in taken))
        box = next(free, boxes[0])
        taken.append(box)
        if box not in boxes[:4]:
            end = (min(max(x, box[0]), box[2]), box[3] if box[3] < y else box[1])
            labels.append(line((x, y), end, stroke="#bbb"))
        labels.append(text(box[0], box[3], told, font_size=11))
    return labels


def _runs(numbers: Sequence[int]) -> str:
    """``1, 2, 5-9`` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def _around(x: float, y: float, width: float) -> Iterator[Box]:
    """Boxes of a line of text around a point, the nearest first."""
    for away in range(12):
        for bottom in (y - 6 - 12 * away, y + 15 + 12 * away):
            for left in (x + 8, x - 8 - width):
                yield left, bottom - 9, left + width, bottom


def _within(box: Box, outer: Box) -> bool:
    return outer[0] <= box[0] and outer[1] <= box[1] and box[2] <= outer[2] and box[3] <= outer[3]


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def picture(
    width: float,
    height: float,
    body: Iterable[str],
    *,
    title: str,
    subtitle: str = "",
    left: float = 10,
    font_size: int = 12,
) -> str:
    """A whole document: white ground, title, one line below it, body."""
    parts = [
        element("rect", width="100%", height="100%", fill="white", class_="ground"),
        text(left, 20, title, font_size=14, font_weight="bold"),
        *([text(left, 37, subtitle, fill=GREY)] if subtitle else []),
        *body,
    ]
    return (
        element(
            "svg",
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            width=width,
            height=height,
            viewBox=f"0 0 {width:g} {height:g}",
            font_family="sans-serif",
            font_size=font_size,
        )
        + "\n"
    )


def rows_picture(
    rows: Sequence[Callable[[float], str]],
    ticks: Sequence[tuple[str, float]],
    band: tuple[float, float, str] | None,
    *,
    axis: str,
    title: str,
    subtitle: str,
) -> str:
    """A line per row, drawn at its y, above an axis from :data:`LEFT` to LEFT + WIDTH.

    ``ticks`` are texts and places in x; ``band`` says from where to where noise goes, and a tip.
    """
    bottom, middle = HEAD + PITCH * len(rows), {"text_anchor": "middle", "fill": GREY}
    body = []
    if band:
        start, end, told = band
        place = {"x": start, "y": HEAD - 8, "width": max(end - start, 2.0)}
        height = bottom - HEAD + 8
        body.append(element("rect", tip(told), **place, height=height, fill="#d9ead3"))
    body += [line((x, HEAD - 8), (x, bottom), stroke="#eee") for _, x in ticks]
    body += [row(HEAD + PITCH * index + 8) for index, row in enumerate(rows)]
    body += [text(x, bottom + 16, tick, **middle) for tick, x in ticks]
    body.append(text(LEFT + WIDTH / 2, bottom + 34, axis, **middle))
    return picture(LEFT + WIDTH + 30, bottom + 44, body, title=title, subtitle=subtitle)
