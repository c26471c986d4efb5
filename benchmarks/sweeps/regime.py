"""What happens at each effective learning rate: how far the weights go, and how much a bound acts.

Every table has a row per method and a column per rate, over seeds, lambdas and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

from stable_forgetting.benchmarks.pipeline.cells import UNDER, Cell, judge
from stable_forgetting.benchmarks.report.cells import MISSING, number, significant
from stable_forgetting.benchmarks.report.section import Section, Table, table
from stable_forgetting.benchmarks.sweeps.board import Sweep

Tell = Callable[[Sequence[Cell]], str]
"""Cells of one method at one rate -> what the table says of them."""


def regime_sections(board: Sweep) -> list[Section]:
    """The tables that have something to say; one that would be empty is left out."""
    retained = board.titles.retained

    def kept(cells: Sequence[Cell]) -> str:
        """The retained metric of the cells that forgot, and how many these are."""
        rule, axes = board.rule, board.rule.axes
        forgot = [
            value
            for cell in _finite(cells)
            if UNDER not in judge(cell, board.targets[cell.seed], rule)
            and (value := cell.metrics[axes.retained]) is not None
        ]
        if not forgot:
            return MISSING
        return f"{number(median(forgot), 1)} ({len(forgot)} of {len(cells)})"

    told: tuple[tuple[str, str, Tell], ...] = (
        (
            "Distance from Original",
            "Median ||dW|| / ||W0|| over the changed matrices.",
            lambda cells: significant(_middle([c.delta_ratio for c in _finite(cells)])),
        ),
        (
            "Where the bound acts",
            "Mean share in percent: of entries whose argument of phi is above 0.5 (of a clip: "
            "above its threshold), in brackets above pi / 2 where that was noted; of a norm ball, "
            "of layers at it.",
            _acting,
        ),
        (
            f"{retained} where forgotten",
            f"Median {retained} of the cells that forget, and how many of all they are.",
            kept,
        ),
        (
            "Diverged",
            "Cells in which a number was not finite or a loss passed the cap (10,000), and the "
            "earliest step at which one had.",
            _diverged,
        ),
    )
    made = [(title, text, _by_rate(board, tell)) for title, text, tell in told]
    return [
        Section(title, (text,), content=content, level="full")
        for title, text, content in made
        if any(cell not in ("", MISSING) for row in content.rows for cell in row[1:])
    ]


def _by_rate(board: Sweep, tell: Tell) -> Table:
    rates = sorted({cell.lr for cell in board.cells})
    rows = []
    for line in board.lines:
        own = [cell for cell in board.cells if cell.label == line.label]
        groups = [[cell for cell in own if cell.lr == rate] for rate in rates]
        rows.append([line.label, *(tell(group) if group else "" for group in groups)])
    return table(["method", *(f"{rate:g}" for rate in rates)], rows)


def _finite(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if not cell.nonfinite]


def _middle(values: Sequence[float | None]) -> float | None:
    return median(given) if (given := [v for v in values if v is not None]) else None


def _acting(cells: Sequence[Cell]) -> str:
    finite = _finite(cells)
    acting = [c.bound_share for c in finite if c.bound_share is not None]
    turned = [c.turned_share for c in finite if c.turned_share is not None]
    if not acting:
        return MISSING
    text = f"{100 * fmean(acting):.0f}"
    return f"{text} ({100 * fmean(turned):.0f})" if turned else text


def _diverged(cells: Sequence[Cell]) -> str:
    gone = [cell.step for cell in cells if cell.nonfinite]
    return f"{len(gone)} of {len(cells)}, by step {min(gone)}" if gone else MISSING
