"""The picture of a leaderboard: how far every row is from Retrain."""

from __future__ import annotations

import math

from benchmarks.leaderboard.board import BoardRow, Leaderboard
from benchmarks.report import svg
from benchmarks.report.section import Picture
from benchmarks.spec.suite import REFERENCES

LEFT, WIDTH, PITCH, HEAD = 190, 520, 22, 46
TICKS = (0, 0.5, 1, 2, 5, 10, 20, 40, 60, 80, 100)


def picture(board: Leaderboard) -> Picture:
    """AG of every row, one dot per seed, the floor as a band."""
    rows = [row for row in board.rows if row.ag_per_seed and row.label != "retrain"]
    top = max((max(row.ag_per_seed.values()) for row in rows), default=1.0) or 1.0
    height = HEAD + PITCH * len(rows) + 40
    body = [_band(board, top, PITCH * len(rows) + 8)]
    body += [_dots(row, HEAD + PITCH * index + 8, top) for index, row in enumerate(rows)]
    body += [
        svg.text(_x(tick, top), height - 14, f"{tick:g}", text_anchor="middle", fill=svg.GREY)
        for tick in TICKS
        if tick <= top
    ]
    title = (
        f"{board.suite.name}: {board.rule.title} to Retrain ({board.rule.unit}; square-root axis)"
    )
    subtitle = "dots: seeds; bar: mean; green: a second Retrain (noise floor)"
    drawn = svg.picture(LEFT + WIDTH + 30, height, body, title=title, subtitle=subtitle)
    return Picture(drawn, title)


def _x(value: float, top: float) -> float:
    return LEFT + WIDTH * math.sqrt(value / top)


def _band(board: Leaderboard, top: float, height: float) -> str:
    floors = [value for value in board.floor.per_seed if value is not None]
    if not floors:
        return ""
    start, end = _x(min(floors), top), _x(max(floors), top)
    width = max(end - start, 2.0)
    return svg.element("rect", x=start, y=HEAD - 8, width=width, height=height, fill="#d9ead3")


def _dots(row: BoardRow, y: float, top: float) -> str:
    colour = svg.GREY if row.method in REFERENCES else "#1f4e9c"
    mean = _x(math.fsum(row.ag_per_seed.values()) / len(row.ag_per_seed), top)
    parts = [
        svg.text(LEFT - 10, y + 4, row.label, text_anchor="end"),
        svg.line((LEFT, y), (LEFT + WIDTH, y), stroke="#eee"),
    ]
    parts += [
        svg.element("circle", cx=_x(v, top), cy=y, r=3.5, fill=colour, fill_opacity=0.55)
        for v in row.ag_per_seed.values()
    ]
    parts.append(svg.line((mean, y - 7), (mean, y + 7), stroke=colour, stroke_width=2))
    return "".join(parts)
