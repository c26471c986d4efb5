"""The picture of a leaderboard: how far every row is from Retrain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.suite.suite import REFERENCES

LEFT, WIDTH, PITCH, HEAD = 190, 520, 22, 64
ROOM = 34
"""Pixels between two ticks."""
BEYOND = 2.0
"""A reference that is this many times as far as the worst method is an arrow with its number."""


@dataclass(frozen=True)
class Dots:
    """A row of the picture; ``distances`` by seed."""

    label: str
    method: str
    distances: Mapping[Any, float]


def picture(board: Leaderboard) -> Picture:
    """AG of every row, one dot per seed, the floor as a band."""
    rows = [Dots(row.label, row.method, row.ag_per_seed) for row in board.rows]
    return draw(board.suite.name, board.rule.title, board.rule.unit, rows, board.floor.per_seed)


def draw(
    name: str, title: str, unit: str, rows: Sequence[Dots], floors: Sequence[float | None]
) -> Picture:
    """The picture of a suite's rows.

    Args:
        name: Of the suite.
        title: Of the distance.
        unit: Of the distance.
        rows: In the order of the table; those without a distance, and Retrain, are left out.
        floors: The noise floor of every seed, as far as it is known.
    """
    retrained = any(row.method == "retrain" for row in rows)
    rows = [row for row in rows if row.distances and row.label != "retrain"]
    top, bottom, known = (
        end_of(rows),
        HEAD + PITCH * len(rows),
        [f for f in floors if f is not None],
    )
    ticks = ticks_to(top)
    body = [_band(known, top, bottom - HEAD + 8)]
    body += [
        svg.line((_x(tick, top), HEAD - 8), (_x(tick, top), bottom), stroke="#eee")
        for tick in ticks
    ]
    body += [_row(row, HEAD + PITCH * index + 8, top) for index, row in enumerate(rows)]
    body += [
        svg.text(_x(tick, top), bottom + 16, f"{tick:g}", text_anchor="middle", fill=svg.GREY)
        for tick in ticks
    ]
    middle = {"text_anchor": "middle", "fill": svg.GREY}
    axis = f"{title} ({unit}; square-root axis)"
    body.append(svg.text(LEFT + WIDTH / 2, bottom + 34, axis, **middle))
    head = f"{name}: {title}" + (" to Retrain" if retrained else "")
    subtitle = "dots: seeds; bar: mean"
    subtitle += "; green: a second Retrain (noise floor)" if known else ""
    drawn = svg.picture(LEFT + WIDTH + 30, bottom + 44, body, title=head, subtitle=subtitle)
    return Picture(drawn, f"{head} ({unit}; square-root axis)")


def end_of(rows: Sequence[Dots]) -> float:
    """The end of the axis: the furthest dot, or that of a method where a reference lies far beyond.

    Args:
        rows: All rows that are drawn.
    """
    far = [max(row.distances.values()) for row in rows if row.method in REFERENCES]
    worst = max(
        (max(r.distances.values()) for r in rows if r.method not in REFERENCES), default=0.0
    )
    near = [value for value in far if not worst or value <= BEYOND * worst]
    return max([worst, *near]) or 1.0


def ticks_to(top: float) -> list[float]:
    """0, and 1, 2 and 5 times powers of ten up to ``top``, as many as have room beside each other.

    Args:
        top: The end of a square-root axis.
    """
    powers = range(math.floor(math.log10(top)) - 3, math.floor(math.log10(top)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    kept: list[float] = []
    for tick in reversed([tick for tick in ticks if tick <= top]):
        right = _x(kept[-1], top) if kept else math.inf
        if min(right - _x(tick, top), _x(tick, top) - _x(0, top)) >= ROOM:
            kept.append(tick)
    return [0.0, *reversed(kept)]


def _x(value: float, top: float) -> float:
    return LEFT + WIDTH * min(1.0, math.sqrt(value / top))


def _band(floors: Sequence[float], top: float, height: float) -> str:
    if not floors:
        return ""
    start, end = _x(min(floors), top), _x(max(floors), top)
    text = svg.tip(f"noise floor: {min(floors):.2f} to {max(floors):.2f}")
    place = {"x": start, "y": HEAD - 8, "width": max(end - start, 2.0), "height": height}
    return svg.element("rect", text, **place, fill="#d9ead3")


def _row(row: Dots, y: float, top: float) -> str:
    colour = svg.GREY if row.method in REFERENCES else "#1f4e9c"
    average = math.fsum(row.distances.values()) / len(row.distances)
    mean = _x(average, top)
    hit = {"x": 0, "y": y - PITCH / 2, "width": LEFT + WIDTH + 30, "height": PITCH}
    told = svg.tip(f"{row.label}: mean {average:.2f} of {len(row.distances)} seeds")
    parts = [
        svg.element("rect", told, **hit, fill="none", pointer_events="all", class_="hit"),
        svg.text(LEFT - 10, y + 4, row.label, text_anchor="end"),
        svg.line((LEFT, y), (LEFT + WIDTH, y), stroke="#eee"),
    ]
    if min(row.distances.values()) > top:
        return svg.element("g", *parts, *_arrow(average, y, colour), class_="row")
    for seed, value in row.distances.items():
        dot = {"cx": _x(value, top), "cy": y, "r": 3.5, "fill": colour, "fill_opacity": 0.55}
        text = svg.tip(f"{row.label}, seed {seed}: {value:.2f}")
        parts.append(svg.element("circle", text, **dot))
    parts.append(svg.line((mean, y - 7), (mean, y + 7), stroke=colour, stroke_width=2))
    return svg.element("g", *parts, class_="row")


def _arrow(average: float, y: float, colour: str) -> list[str]:
    """A row that lies beyond the axis: its mean, and an arrow to the right."""
    text = f"{average:.0f} \N{RIGHTWARDS ARROW}"
    return [svg.text(LEFT + WIDTH, y + 4, text, text_anchor="end", fill=colour)]
