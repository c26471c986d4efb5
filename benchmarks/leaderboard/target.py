"""The picture of a target: what each row forgets and keeps, seen from Retrain in the middle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard
from stable_forgetting.benchmarks.leaderboard.trajectory import Trajectories, mean_line
from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS

SIDE, LEFT, TOP, LINE, NAME = 440, 60, 56, 18, 180
TICKS = (100, 50, 20, 10, 5, 2, 1, 0.5, 0.2)
ROOM = 26
"""Pixels between ticks."""
COLOUR = {"original": "#c0392b", FLOOR: "#1e8449"}
Place = tuple[float, float]
"""Gaps to Retrain: of what is to be forgotten, and of what is to be kept."""


def target(board: Leaderboard, trajectories: Trajectories | None = None) -> Picture | None:
    """Every row by its mean gaps to Retrain; None where the benchmark names no two metrics for it.

    Args:
        board: Of a suite with Retrain.
        trajectories: Rows that were evaluated in training also have a path.
    """
    axes = BENCHMARKS[board.suite.spec.benchmark].sweep_axes
    retrain = next((row for row in board.rows if row.target), None)
    if axes is None or retrain is None:
        return None
    names = (axes.forgotten, axes.retained)
    rows = [row for row in board.rows if not row.target and set(names) <= set(row.gaps)]
    if not rows or not set(names) <= set(retrain.metrics):
        return None
    aims = [retrain.metrics[name].mean for name in names]
    paths = {label: _path(of_row, names, aims) for label, of_row in (trajectories or {}).items()}
    places = {row.label: (row.gaps[names[0]].mean, row.gaps[names[1]].mean) for row in rows}
    reach = tuple(
        max(
            0.5,
            *(abs(place[i]) for path in paths.values() for place in path),
            *(abs(row.gaps[name].mean) + (row.gaps[name].std or 0.0) for row in rows),
        )
        for i, name in enumerate(names)
    )
    body = _frame(reach, *(board.specs[name].title for name in names))
    for row in rows:
        colour = COLOUR.get(row.label, svg.GREY if row.method in REFERENCES else "#1f4e9c")
        points = [_at(place, reach) for place in paths.get(row.label, ())]
        body.append(svg.polyline(points, stroke=colour, stroke_opacity=0.5) if points else "")
        body.append(_mark(row, names, places[row.label], reach, colour))
    square = (LEFT, TOP, LEFT + SIDE, TOP + SIDE)
    body += svg.numbered([_at(places[row.label], reach) for row in rows], square)
    lines = max(SIDE // LINE, -(-len(rows) // 2))  # two columns at most
    for i, row in enumerate(rows):
        column, at = divmod(i, lines)
        x, y = LEFT + SIDE + 30 + NAME * column, TOP + 10 + LINE * at
        body.append(svg.text(x, y, f"{i + 1}  {row.label}"))
    title = f"{board.suite.name}: what is forgotten and what is kept, less Retrain's"
    drawn = svg.picture(
        LEFT + SIDE + 240 + NAME * (len(rows) > lines),
        max(TOP + SIDE + 50, TOP + 20 + LINE * lines),
        body,
        title=title,
        subtitle="middle: Retrain; bars: standard deviation over seeds; square-root axes",
    )
    return Picture(drawn, title)


def _path(by_seed: Mapping[int, Any], names: tuple[str, str], aims: list[float]) -> list[Place]:
    """Gaps after each evaluated step, of means over the seeds."""
    first, second = (mean_line(by_seed, name) for name in names)
    return [(first[step] - aims[0], second[step] - aims[1]) for step in first if step in second]


def _at(place: Place, reach: tuple[float, ...]) -> Place:
    along, up = (
        math.copysign(math.sqrt(abs(value) / end), value)
        for value, end in zip(place, reach, strict=True)
    )
    return LEFT + SIDE * (1 + along) / 2, TOP + SIDE * (1 - up) / 2


def _ticks(reach: float) -> list[float]:
    """Round gaps on both sides of 0, as many as have room."""
    kept = svg.root_ticks(TICKS, reach, SIDE / 2, ROOM)
    return [sign * tick for tick in kept for sign in (-1, 1)]


def _frame(reach: tuple[float, ...], forgotten: str, kept: str) -> list[str]:
    """Lines of equal gap to Retrain, and what the sides mean."""
    middle = _at((0.0, 0.0), reach)
    style = {"fill": svg.GREY, "font_size": 11}
    across = [(f"{tick:+g}", _at((tick, 0.0), reach)[0]) for tick in _ticks(reach[0])]
    up = [(f"{tick:+g}", _at((0.0, tick), reach)[1]) for tick in _ticks(reach[1])]
    ends: dict[str, Any] = {"stroke": "#999"}
    return [
        *svg.grid(LEFT, TOP, SIDE, across, up),
        svg.line((middle[0], TOP), (middle[0], TOP + SIDE), **ends),
        svg.line((LEFT, middle[1]), (LEFT + SIDE, middle[1]), **ends),
        svg.text(LEFT, TOP + SIDE + 34, "\N{LEFTWARDS ARROW} forgotten beyond Retrain", **style),
        svg.text(
            LEFT + SIDE,
            TOP + SIDE + 34,
            f"still known: {forgotten} \N{RIGHTWARDS ARROW}",
            text_anchor="end",
            **style,
        ),
        svg.text(LEFT + 6, TOP + 12, f"\N{UPWARDS ARROW} kept: {kept}", **style),
    ]


def _mark(
    row: BoardRow, names: tuple[str, str], place: Place, reach: tuple[float, ...], colour: str
) -> str:
    x, y = _at(place, reach)
    spread = [row.gaps[name].std or 0.0 for name in names]
    left, right = (_at((place[0] + sign * spread[0], place[1]), reach) for sign in (-1, 1))
    low, high = (_at((place[0], place[1] + sign * spread[1]), reach) for sign in (-1, 1))
    told = f"{row.label}: forget {place[0]:+.1f}, keep {place[1]:+.1f} points"
    bars: dict[str, Any] = {"stroke": colour, "stroke_opacity": 0.4}
    return svg.element(
        "g",
        svg.tip(told),
        svg.line(left, right, **bars),
        svg.line(low, high, **bars),
        svg.element("circle", cx=x, cy=y, r=5.0, fill=colour, fill_opacity=0.6),
        class_="row",
    )
