"""The picture of a leaderboard: how far every row is from Retrain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard
from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.report.svg import LEFT, PITCH, WIDTH
from stable_forgetting.benchmarks.suite.suite import REFERENCES

ROOM = 34
"""Pixels between two ticks."""
BEYOND = 2.0
"""A reference that is this many times as far as the worst method is an arrow with its number."""


def picture(board: Leaderboard) -> Picture:
    """AG of every row, one dot per seed, the floor as a band."""
    rule = board.rule
    return draw(board.suite.name, rule.title, rule.unit, board.rows, board.floor.per_seed)


def drawn_again(data: Mapping[str, Any]) -> Picture:
    """The same picture from a report's ``leaderboard.json``."""
    distance, floor = data["distance"], data["floor"] or {}
    rows = [
        BoardRow(row["row"], row["method"], ag_per_seed=row["ag_per_seed"]) for row in data["rows"]
    ]
    floors = floor.get("per_seed", ())
    return draw(data["suite"], distance["title"], distance["unit"], rows, floors)


def draw(
    name: str, title: str, unit: str, rows: Sequence[BoardRow], floors: Sequence[float | None]
) -> Picture:
    """The picture of a suite's rows; ``title`` and ``unit`` are the distance's.

    Rows without a distance, and Retrain, are left out.  ``floors`` are the seeds' noise floors.
    """
    retrained = any(row.method == "retrain" for row in rows)
    rows = [row for row in rows if row.ag_per_seed and not row.target]
    top, known = end_of(rows), [floor for floor in floors if floor is not None]
    band = None
    if known:
        told = f"noise floor: {min(known):.2f} to {max(known):.2f}"
        band = _x(min(known), top), _x(max(known), top), told
    axis = f"{title} ({unit}; square-root axis)"
    head = f"{name}: {title}" + (" to Retrain" if retrained else "")
    drawn = svg.rows_picture(
        [partial(_row, row, top) for row in rows],
        [(f"{tick:g}", _x(tick, top)) for tick in ticks_to(top)],
        band,
        axis=axis,
        title=head,
        subtitle="dots: seeds; bar: mean" + "; green: a second Retrain (noise floor)" * bool(known),
    )
    return Picture(drawn, f"{head} ({unit}; square-root axis)")


def end_of(rows: Sequence[BoardRow]) -> float:
    """The end of the axis: the furthest dot, or that of a method beside far references."""
    far = [max(row.ag_per_seed.values()) for row in rows if row.method in REFERENCES]
    worst = max(
        (max(r.ag_per_seed.values()) for r in rows if r.method not in REFERENCES), default=0.0
    )
    near = [value for value in far if not worst or value <= BEYOND * worst]
    return max([worst, *near]) or 1.0


def ticks_to(top: float) -> list[float]:
    """0, and 1, 2 and 5 times powers of ten up to the axis' end, as many as have room."""
    powers = range(math.floor(math.log10(top)) - 3, math.floor(math.log10(top)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [0.0, *reversed(svg.root_ticks(ticks, top, WIDTH, ROOM))]


def _x(value: float, top: float) -> float:
    return LEFT + WIDTH * min(1.0, math.sqrt(value / top))


def _row(row: BoardRow, top: float, y: float) -> str:
    colour = svg.GREY if row.method in REFERENCES else "#1f4e9c"
    average = math.fsum(row.ag_per_seed.values()) / len(row.ag_per_seed)
    mean = _x(average, top)
    told = f"{row.label}: mean {average:.2f} of {len(row.ag_per_seed)} seeds"
    parts = [
        svg.hit(told, 0, y - PITCH / 2, LEFT + WIDTH + 30, PITCH),
        svg.text(LEFT - 10, y + 4, row.label, text_anchor="end"),
        svg.line((LEFT, y), (LEFT + WIDTH, y), stroke="#eee"),
    ]
    if min(row.ag_per_seed.values()) > top:
        beyond = f"{average:.0f} \N{RIGHTWARDS ARROW}"
        parts.append(svg.text(LEFT + WIDTH, y + 4, beyond, text_anchor="end", fill=colour))
        return svg.element("g", *parts, class_="row")
    for seed, value in row.ag_per_seed.items():
        dot = {"cx": _x(value, top), "cy": y, "r": 3.5, "fill": colour, "fill_opacity": 0.55}
        text = svg.tip(f"{row.label}, seed {seed}: {value:.2f}")
        parts.append(svg.element("circle", text, **dot))
    parts.append(svg.line((mean, y - 7), (mean, y + 7), stroke=colour, stroke_width=2))
    return svg.element("g", *parts, class_="row")
