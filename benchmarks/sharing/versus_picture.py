"""The picture of rows held against each other: one panel per pair, one line per table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.sharing.versus import Encounter

LEFT, PANEL, GAP, PITCH, HEAD = 190, 190, 20, 20, 108
TICKS = (-100, -50, 0, 50, 100)
COLOURS = {"nearer": "#1f7a3a", "farther": "#b3261e"}
"""Reading -> colour; any other is grey."""


def picture(met: Sequence[Encounter]) -> Picture:
    """Differences with their intervals, in percent of the sum of both distances."""
    pairs = list(dict.fromkeys(own.pair for own in met))
    suites = sorted({own.suite for own in met})
    places = {suite: HEAD + PITCH * index + 8 for index, suite in enumerate(suites)}
    bottom = HEAD + PITCH * len(suites)
    body = [svg.text(LEFT - 10, y + 4, s, text_anchor="end") for s, y in places.items()]
    for index, pair in enumerate(pairs):
        left = LEFT + index * (PANEL + GAP)
        own = [each for each in met if each.pair == pair]
        body += _frame(pair, left, bottom)
        body += [_line(each, left, places[each.suite]) for each in own if each.share]
    width = LEFT + len(pairs) * (PANEL + GAP)
    axis = "difference of the distances to the goal, in percent of their sum"
    middle = {"text_anchor": "middle", "fill": svg.GREY}
    body.append(svg.text((LEFT + width - GAP) / 2, bottom + 38, axis, **middle))
    title = "One row against another, in every table that has both"
    subtitle = (
        "dot: mean over seeds, bar: 95 % CI; green (first nearer) and red (second nearer) "
        "where different after the correction"
    )
    names = "; ".join(f"{a} against {b}" for a, b in pairs)
    drawn = svg.picture(width, bottom + 48, body, title=title, subtitle=subtitle)
    return Picture(drawn, f"{title}: {names}; {axis}")


def _x(value: float, left: float) -> float:
    """-100 to 100 on a panel; what lies beyond is at its edge."""
    return left + PANEL / 2 * (1 + min(max(value, -100), 100) / 100)


def _frame(pair: tuple[str, str], left: float, bottom: float) -> Iterator[str]:
    middle = {"text_anchor": "middle"}
    for y, name in ((60, pair[0]), (76, f"− {pair[1]}")):
        yield svg.text(left + PANEL / 2, y, name, font_weight="bold", **middle)
    small = {"fill": svg.GREY, "font_size": 11}
    yield svg.text(left, 92, "← first nearer", **small)
    yield svg.text(left + PANEL, 92, "second nearer →", text_anchor="end", **small)
    for tick in TICKS:
        x = _x(tick, left)
        yield svg.line((x, HEAD - 8), (x, bottom), stroke="#eee" if tick else "#999")
        if abs(tick) < 100:
            yield svg.text(x, bottom + 16, f"{tick:g}", **middle, **small)


def _line(own: Encounter, left: float, y: float) -> str:
    assert own.share is not None
    mean, low, high = (_x(value, left) for value in own.share)
    colour = COLOURS.get(own.reading, "#888")
    told = f"{own.suite}: {own.share[0]:+.1f} % [{own.share[1]:+.1f}, {own.share[2]:+.1f}]"
    return svg.element(
        "g",
        svg.hit(f"{told}; {own.reading}", left, y - PITCH / 2, PANEL, PITCH),
        svg.line((low, y), (high, y), stroke=colour, stroke_width=2),
        svg.element("circle", cx=mean, cy=y, r=4, fill=colour),
        class_="row",
    )
