"""The picture of what is forgotten against what is kept, both as distances to a retrained model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stable_forgetting.benchmarks.leaderboard.settings import place_of
from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.suite.goals import metric_specs
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS

SIDE, LEFT, TOP, LINE = 280, 44, 68, 16
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
ROOM = 24
"""Pixels between two ticks."""
Place = tuple[float, float]
"""Distances to Retrain: of what is to be forgotten, and of what is to be kept."""


@dataclass(frozen=True)
class Sides:
    """What the two axes are.

    Attributes:
        weights: Per axis, metric -> what its absolute gap to Retrain counts for.
        unit: Of both.
    """

    weights: tuple[Mapping[str, float], Mapping[str, float]]
    titles: tuple[str, str]
    unit: str


def sides_of(suite: ResolvedSuite) -> Sides | None:
    """The first two axes of the suite's rule, or the two metrics that its sweeps judge by.

    None where the benchmark names neither.
    """
    benchmark = BENCHMARKS[suite.spec.benchmark]
    rule, axes = benchmark.gap_of(suite.protocol), benchmark.sweep_axes
    if len(rule.axes) > 1:
        first, second = rule.axes[:2]
        return Sides((first.weights, second.weights), (first.title, second.title), rule.unit)
    if axes is None:
        return None
    names = (axes.forgotten, axes.utility)
    specs = metric_specs(suite.spec, suite.probes)
    weights = ({names[0]: 1.0}, {names[1]: 1.0})
    return Sides(weights, (specs[names[0]].title, specs[names[1]].title), "points")


def places(runs: Iterable[Mapping[str, Any]], sides: Sides) -> dict[str, Place]:
    """Row -> its distances, means over its seeds; the second Retrain is :data:`FLOOR`.

    ``runs`` are lines of ``runs.csv``.
    """
    found: dict[str, list[Place]] = {}
    runs = list(runs)
    targets = {
        str(run["seed"]): run
        for run in runs
        if run["method"] == "retrain" and str(run["replicate"]) == "0"
    }
    for run in runs:
        row = {"0": run["row"], "1": FLOOR}.get(str(run["replicate"]))
        if run["status"] != "ok" or row is None or (run["method"] in REFERENCES and row != FLOOR):
            continue
        target = targets.get(str(run["seed"]), {})
        own = [_distance(run, target, weights) for weights in sides.weights]
        if None not in own:
            found.setdefault(row, []).append((own[0] or 0.0, own[1] or 0.0))
    return {
        row: (fmean(place[0] for place in own), fmean(place[1] for place in own))
        for row, own in found.items()
    }


def _distance(
    run: Mapping[str, Any], target: Mapping[str, Any], weights: Mapping[str, float]
) -> float | None:
    """The weighted mean of absolute gaps; None where a value of either run is missing."""
    pairs = {name: (run.get(name), target.get(name)) for name in weights}
    if any(value in (None, "") for pair in pairs.values() for value in pair):
        return None
    gaps = {
        name: abs(float(ours or 0) - float(theirs or 0)) for name, (ours, theirs) in pairs.items()
    }
    return math.fsum(weights[name] * gap for name, gap in gaps.items()) / math.fsum(
        weights.values()
    )


def front(found: Mapping[str, Place]) -> list[str]:
    """Rows that no other row beats on one axis and equals on the other, from left to right."""
    rows = sorted((row for row in found if row != FLOOR), key=lambda row: found[row])
    kept: list[str] = []
    for row in rows:
        if not kept or found[row][1] < found[kept[-1]][1] or found[row] == found[kept[-1]]:
            kept.append(row)
    return kept


def picture(name: str, found: Mapping[str, Place], sides: Sides, file: str) -> Picture:
    """A mark per row, each a link to what ``file`` says of it, the floor, and the front."""
    reach = (*(max(0.5, *(place[axis] for place in found.values())) for axis in (0, 1)),)
    best, rows = front(found), [row for row in found if row != FLOOR]
    body = _frame(reach, sides)
    if FLOOR in found:
        x, y = _at(found[FLOOR], reach)
        told = f"a second Retrain: {found[FLOOR][0]:.2f} and {found[FLOOR][1]:.2f} {sides.unit}"
        box = {"x": LEFT, "y": y, "width": max(x - LEFT, 2.0), "height": max(TOP + SIDE - y, 2.0)}
        body.append(svg.element("rect", svg.tip(told), **box, fill="#d9ead3"))
    body.append(svg.polyline([_at(found[row], reach) for row in best], stroke="#1e8449"))
    for row in [*(row for row in rows if row not in best), *best]:
        x, y = _at(found[row], reach)
        told = f"{row}: {found[row][0]:.2f} and {found[row][1]:.2f} {sides.unit}"
        colour = "#1e8449" if row in best else "#1f4e9c"
        dot = svg.element("circle", cx=x, cy=y, r=4.5, fill=colour, fill_opacity=0.6)
        body.append(svg.element("a", dot, svg.tip(told), href=f"{file}#{place_of(row)}"))
    spots = {row: _at(found[row], reach) for row in rows}
    square = (LEFT, TOP, LEFT + SIDE + 26, TOP + SIDE)
    body += svg.numbered([spots[row] for row in best], square, [*spots.values()])
    y = TOP + SIDE + 54
    body += [svg.text(LEFT, y + LINE * n, f"{n + 1}  {row}") for n, row in enumerate(best)]
    title = f"{name}: {len(rows)} rows"
    drawn = svg.picture(
        LEFT + SIDE + 26,
        y + LINE * len(best),
        body,
        title=title,
        subtitle=f"distance to Retrain, {sides.unit}, square-root axes",
    )
    return Picture(drawn, f"{title}: what is forgotten against what is kept")


def _at(place: Place, reach: tuple[float, ...]) -> Place:
    along, up = (math.sqrt(value / end) for value, end in zip(place, reach, strict=True))
    return LEFT + SIDE * along, TOP + SIDE * (1 - up)


def _frame(reach: tuple[float, ...], sides: Sides) -> list[str]:
    grey: dict[str, Any] = {"fill": svg.GREY, "font_size": 11}
    ticks = [[*svg.root_ticks(TICKS, end, SIDE, ROOM), 0] for end in reach]
    along = [(f"{tick:g}", _at((tick, 0), reach)[0]) for tick in ticks[0]]
    above = [(f"{tick:g}", _at((0, tick), reach)[1]) for tick in ticks[1]]
    body = svg.grid(LEFT, TOP, SIDE, along, above)
    across, up = (
        f"{words}: {t}"
        for words, t in zip(("of the forgotten", "of the kept"), sides.titles, strict=True)
    )
    right = {"text_anchor": "end", **grey}
    body.append(svg.text(LEFT + SIDE, TOP + SIDE + 32, f"{across} \N{RIGHTWARDS ARROW}", **right))
    body.append(svg.text(10, TOP - 8, f"\N{UPWARDS ARROW} {up}", **grey))
    return body
