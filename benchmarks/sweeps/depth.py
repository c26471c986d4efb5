"""Width against depth: along the size of a bound, how much is accepted and how soon it comes back.

Rows that differ in the size of their bound alone are one line; its last point is the row without a
bound.  Depth is that of each row's best cell, as the suite's relearning audits measured it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.benchmarks.report import curves
from stable_forgetting.benchmarks.report.cells import MISSING, number
from stable_forgetting.benchmarks.report.section import Column, Picture, Table, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.sweeps.board import Sweep
from stable_forgetting.common.base.config import canonical, digest
from stable_forgetting.common.bounded.phi import PHIS

ABSOLUTE, FREE = "absolute", "none"
LOSSES = {"cross_entropy": "ascent", "unlikelihood": "saturating loss"}
STEPS = "steps"
Place = float | str
"""Where a row stands: c of a bound relative to W0, :data:`ABSOLUTE` or :data:`FREE`."""


@dataclass(frozen=True)
class Trait:
    """What the figure knows of a row.

    Attributes:
        shape: Activation, ``ball``, or ``""`` without a bound.
        place: Size of the bound.
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
        title: Its name.
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
    for name in ("lr", "lam", "steps", "ball"):
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
    reference = next(row.label for row in board.suite.rows if row.method == "retrain")
    config = audit.audit.config
    part, shots = getattr(audit.audit, "part", "forget"), config.shots
    return Panel(
        f"steps to relearn: {shots or 'all'} {part} samples",
        {label: own for label, own in values.items() if own},
        frozenset(cut),
        mean(values[reference]) if values.get(reference) else None,
    )


def depth_table(board: Sweep) -> Table:
    """The numbers behind the figure, one row per point."""
    shown = panels(board)
    rows = [
        [name, place_text(place), label, *(_cell(panel, label) for panel in shown)]
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


def place_text(place: Place) -> str:
    """``0.3``, ``absolute`` or ``none``."""
    return f"{place:g}" if isinstance(place, float) else place


def depth_picture(board: Sweep) -> Picture | None:
    """The panels as curves along the sizes; None without several sizes, or without a cell yet."""
    lines = lines_of(board.suite)
    if not lines or not board.lines:
        return None
    places = sorted({place for points in lines.values() for place, _ in points}, key=order)
    axis = f"c: {', '.join(map(place_text, places))}"
    drawn = []
    for panel in panels(board):
        means = {
            name: {
                places.index(p): mean(panel.values[row]) for p, row in points if row in panel.values
            }
            for name, points in lines.items()
        }
        own = {name: line for name, line in means.items() if line}
        ends = (0, len(places) - 1)
        level = {} if panel.retrain is None else {"2 3": dict.fromkeys(ends, panel.retrain)}
        drawn += [curves.Panel(panel.title, own, ends, axis, level)] if own else []
    seeds = ", ".join(map(str, sorted(board.targets)))
    title = f"{board.suite.name}: width against depth along c, seeds {seeds}; grey: Retrain"
    picture = curves.draw(drawn, [*lines], title)
    return Picture(picture, "width against depth along c", "depth.svg")
