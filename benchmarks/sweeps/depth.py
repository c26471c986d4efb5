"""How much of a sweep is accepted, and how soon a relearning attack brings the knowledge back.

Rows that differ in the size of their bound alone are one line; its last point is the row without a
bound.  The steps are those of each row's best cell, as the suite's relearning audits measured them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.cells import MISSING, number, significant
from stable_forgetting.benchmarks.report.section import Column, Picture, Table, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.sweeps.board import Sweep
from stable_forgetting.common.audits.base import Measure
from stable_forgetting.common.base.config import canonical, digest
from stable_forgetting.common.bounded.phi import PHIS

ABSOLUTE, FREE = "absolute", "none"
LOSSES = {"cross_entropy": "ascent", "unlikelihood": "saturating loss"}
STEPS = "steps"
TITLE = "accepted settings against steps to relearn"
SIDE, LEFT, TOP, LINE = 400, 50, 70, 17
STEP_TICKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
Place = float | str
"""Where a row stands: c of a bound relative to W0, :data:`ABSOLUTE` or :data:`FREE`."""


@dataclass(frozen=True)
class Trait:
    """What the table knows of a row.

    Attributes:
        shape: Activation, ``ball``, or ``""`` without a bound.
        loss: The forget loss, in words.
        rest: Digest of everything else in its config.
    """

    shape: str
    place: Place
    loss: str
    rest: str


@dataclass(frozen=True)
class Panel:
    """One quantity of every row.

    Attributes:
        values: Label -> value per seed.
        cut: Labels of which a training was cut off, so that the value is a lower end.
        retrain: Retrain's mean; None where there is none.
    """

    title: str
    values: Mapping[str, Sequence[float]]
    cut: frozenset[str] = frozenset()
    retrain: float | None = None


def trait(row: ResolvedRow) -> Trait | None:
    """Where a row stands; None for a method without an adapter or without a choice of its loss."""
    config: Any = row.config
    adapter, loss = getattr(config, "adapter", None), getattr(config, "forget_loss", None)
    if adapter is None or loss not in LOSSES:
        return None
    whole = canonical(config)
    own = {**whole, "adapter": dict(whole["adapter"])}
    for name in ("lr", "forget_weight", "steps", "ball"):
        own.pop(name, None)
    for name in ("phi", "bound", "c"):
        own["adapter"].pop(name, None)
    shape: str = "ball" if config.ball else adapter.phi if PHIS[adapter.phi].bounded else ""
    place: Place = config.ball or (adapter.c if adapter.bound == "relative" else ABSOLUTE)
    return Trait(shape, place if shape else FREE, LOSSES[loss], digest(own))


def lines_of(suite: ResolvedSuite) -> dict[str, list[tuple[Place, str]]]:
    """Name -> (size of the bound, row), in the order of the sizes; empty unless several are tried.

    A line has the unbounded row that shares all but the bound as its end, and two points at least.
    """
    traits = {row.label: own for row in suite.rows if row.grid and (own := trait(row))}
    if len({t.place for t in traits.values() if isinstance(t.place, float)}) < 2:
        return {}
    lines: dict[tuple[str, str, str], list[tuple[Place, str]]] = {}
    for label, own in traits.items():
        if own.shape:
            lines.setdefault((own.shape, own.loss, own.rest), []).append((own.place, label))
    named: dict[str, list[tuple[Place, str]]] = {}
    for (shape, loss, rest), points in lines.items():
        free = [(FREE, label) for label, t in traits.items() if not t.shape and t.rest == rest]
        ordered = sorted(points, key=lambda point: order(point[0])) + free[:1]
        if len(ordered) > 1:
            name = f"{shape}, {loss}"
            named[f"{name} ({points[0][1]})" if name in named else name] = ordered
    return named


def order(place: Place) -> tuple[int, float]:
    """Sizes ascending, then the absolute bound, then none."""
    return (0, place) if isinstance(place, float) else ((ABSOLUTE, FREE).index(place) + 1, 0.0)


def panels(board: Sweep) -> list[Panel]:
    """The accepted share, then the steps of every relearning audit that has been measured."""
    widths = {line.label: line.accepted for line in board.lines}
    depths = [_depth(board, audit) for audit in board.audits if STEPS in audit.columns]
    return [Panel("accepted cells, %", widths), *depths]


def _depth(board: Sweep, audit: AuditTable) -> Panel:
    values: dict[str, list[float]] = {}
    cut = set()
    for label, seeds in audit.rows.items():
        cells = [cell[STEPS] for cell in seeds.values() if isinstance(cell, dict)]
        values[label] = [cell.value for cell in cells if cell.value is not None]
        cut |= {label} if any("cut off" in cell.note for cell in cells) else set()
    reference = board.suite.retrain
    config = audit.audit.config
    part, shots = getattr(audit.audit, "part", "forget"), config.shots
    return Panel(
        f"steps to relearn: {shots or 'all'} {part} samples",
        {label: own for label, own in values.items() if own},
        frozenset(cut),
        mean(values[reference]) if values.get(reference) else None,
    )


def depth_table(board: Sweep) -> Table:
    """Along the size of each bound: the accepted share, and the steps of every audit."""
    shown = panels(board)
    rows = [
        [
            name,
            place if isinstance(place, str) else f"{place:g}",
            label,
            *(_cell(panel, label) for panel in shown),
        ]
        for name, points in lines_of(board.suite).items()
        for place, label in points
    ]
    doc = "is the size of the bound, in units of rms(W0) or, of the ball, of ||W0||"
    heads: list[str | Column] = ["line", Column("c", doc=doc), "row"]
    return table([*heads, *(Column(panel.title, "number") for panel in shown)], rows)


def _cell(panel: Panel, label: str) -> str:
    values = panel.values.get(label)
    if not values:
        return MISSING
    return f"{'≥ ' if label in panel.cut else ''}{number(math.fsum(values) / len(values), 1)}"


def depth_picture(board: Sweep) -> Picture | None:
    """A mark per row: the share that is accepted and the steps to relearn; None of fewer than two.

    The steps are those of the first audit that trains on forgotten samples.
    """
    audits = [audit for audit in board.audits if STEPS in audit.columns]
    relearned = next((a for a in audits if getattr(a.audit, "part", "forget") == "forget"), None)
    if relearned is None:
        return None
    steps = {label: relearned.summary(label, STEPS) for label in relearned.rows}
    accepted = {line.label: mean(line.accepted) for line in board.lines if line.accepted}
    retrain = steps.get(board.suite.retrain)
    known = {label: one for label, one in steps.items() if one and one.value is not None}
    labels = [label for label in accepted if label in known]
    if len(labels) < 2:
        return None
    measured = [one for one in (*(known[n] for n in labels), retrain) if one]
    top = max(1.0, *(_ends(one)[1] for one in measured))  # all may take no step
    colours = _colours(board.suite)
    dots = [_place(accepted[label], known[label].value or 0.0, top) for label in labels]
    body = _frame(top, retrain)
    for index, (label, dot) in enumerate(zip(labels, dots, strict=True)):
        colour = colours.get(label, svg.GREY)
        body.append(_mark(label, accepted[label], known[label], dot, top, colour))
        place = (LEFT + SIDE + 30, TOP + 10 + LINE * index)
        body.append(svg.text(*place, f"{index + 1}  {label}", fill=colour, font_size=11))
    body += svg.numbered(dots, (LEFT, TOP, LEFT + SIDE, TOP + SIDE))
    bottom = TOP + SIDE + 54
    if missing := len(accepted) - len(labels):
        text = (
            f"Left out: {missing} of {len(accepted)} rows, of which no accepted cell was attacked."
        )
        body.append(svg.text(LEFT, bottom, text, fill=svg.GREY, font_size=11))
    height = max(bottom + 14, TOP + 20 + LINE * len(labels))
    subtitle = "blue: bounded; red: the same without a bound; grey: others; " * bool(colours)
    subtitle += f"bars: {known[labels[0]].interval}"
    title = f"{board.suite.name}: {TITLE}"
    size = (LEFT + SIDE + 200, height)
    return Picture(svg.picture(*size, body, title=title, subtitle=subtitle), TITLE, "depth.svg")


def _colours(suite: ResolvedSuite) -> dict[str, str]:
    """Of the rows whose bound is tried in several sizes, and of those beside them without one."""
    points = [point for line in lines_of(suite).values() for point in line]
    return {label: "#c0392b" if place == FREE else "#1f4e9c" for place, label in points}


def _ends(measure: Measure) -> tuple[float, float]:
    value = measure.value or 0.0
    ends = (value if end is None else end for end in (measure.low, measure.high))
    low, high = ends
    return max(0.0, low), high


def _place(accepted: float, steps: float, top: float) -> tuple[float, float]:
    up = math.log1p(steps) / math.log1p(top)
    return LEFT + SIDE * accepted / 100, TOP + SIDE * (1 - up)


def _frame(top: float, retrain: Measure | None) -> list[str]:
    """The axes, and Retrain's steps as a line."""
    grey: dict[str, Any] = {"fill": svg.GREY, "font_size": 11}
    steps = [tick for tick in STEP_TICKS if tick <= top]
    across = [(f"{tick}", _place(tick, 0, top)[0]) for tick in (0, 25, 50, 75, 100)]
    up = [(f"{tick}", _place(0, tick, top)[1]) for tick in steps]
    body = svg.grid(LEFT, TOP, SIDE, across, up)
    if retrain and retrain.value is not None:
        x, y = _place(0, retrain.value, top)
        told = f"Retrain {_least(retrain)}{significant(retrain.value)}"
        body.append(svg.line((x, y), (x + SIDE, y), stroke="#1e8449", stroke_width=2))
        beside = y - 5 if y > TOP + LINE else y + LINE - 2
        body.append(svg.text(x + 4, beside, told, font_size=11))
    axis = "share of settings that the sweep accepts, % \N{RIGHTWARDS ARROW}"
    body.append(svg.text(LEFT + SIDE, TOP + SIDE + 32, axis, text_anchor="end", **grey))
    body.append(svg.text(10, TOP - 10, "\N{UPWARDS ARROW} steps to relearn, log(1 + n)", **grey))
    return body


def _least(measure: Measure) -> str:
    """A sign before the value of a training that was cut off."""
    return "\N{GREATER-THAN OR EQUAL TO} " if "cut off" in measure.note else ""


def _mark(
    label: str, accepted: float, steps: Measure, dot: tuple[float, float], top: float, colour: str
) -> str:
    low, high = (_place(accepted, end, top) for end in _ends(steps))
    told = f"{label}: {accepted:.1f} % accepted, relearned in {_least(steps)}"
    fill = "none" if _least(steps) else colour
    return svg.element(
        "g",
        svg.tip(f"{told}{significant(steps.value)} steps"),
        svg.line(low, high, stroke=colour, stroke_opacity=0.4),
        svg.element("circle", cx=dot[0], cy=dot[1], r=5.0, fill=fill, stroke=colour),
        class_="row",
    )
