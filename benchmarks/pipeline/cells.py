"""Cells of a grid: what the rule says of them, and which setting is best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from stable_forgetting.benchmarks.suite.grid import Acceptance
from stable_forgetting.common.measure.gaps import Summary, summarise

UNDER, DAMAGE = "U", "D"
TOLERANCE = 1e-9
"""Percentages are sums of float32; a cell on the rule's edge is inside."""

Target = Mapping[str, float]
"""What Retrain of the same seed scores: metric -> value."""


@dataclass(frozen=True)
class Cell:
    """One run at one step.

    Attributes:
        extension: Outside the grid that all rows share: for edges and bands only.
        lr: Effective rate.
        lam: Value of the row's second axis.
        metrics: Metric of the sweep -> value, None where the run diverged.
        delta_ratio: ||dW||_F / ||W0||_F over the changed matrices.
        bound_share: Share of (step, layer) pairs at the ball, or of entries inside the bound's
            curved part (|argument| > 0.5, of a clip its threshold); None without a bound.
        turned_share: Share of entries with |argument| > pi / 2, where a sine has turned back; None
            without an entrywise bound, or where it was not noted.
    """

    label: str
    seed: int
    extension: bool
    lr: float
    lam: float
    step: int
    metrics: Mapping[str, float | None]
    delta_ratio: float | None = None
    bound_share: float | None = None
    turned_share: float | None = None
    nonfinite: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any], label: str, seed: int, extension: bool) -> Cell:
        """From a line of a block's file, where metrics stand beside the other numbers."""
        own = {field.name for field in fields(cls)}
        metrics = {key: value for key, value in line.items() if key not in own}
        rest = {key: value for key, value in line.items() if key in own}
        return cls(label=label, seed=seed, extension=extension, metrics=metrics, **rest)

    def line(self) -> dict[str, Any]:
        """One flat JSON object."""
        line = asdict(self)
        return {**line.pop("metrics"), **line}


@dataclass(frozen=True)
class Edge:
    """One end of the learning-rate axis.

    Attributes:
        lr: The outermost column that was run; None while that is not known.
        fails: Whether no cell of that column is accepted, so that the band ends before it.
    """

    lr: float | None
    fails: bool


def judge(cell: Cell, target: Target, rule: Acceptance) -> str:
    """Why a cell fails.

    Returns:
        U: forgotten is too high; D: retained, utility or a two-sided forgotten is too low, or the
        run diverged; both; or "".
    """
    if cell.nonfinite:
        return DAMAGE
    forgotten = rule.axes.forgotten
    value, tolerance = cell.metrics[forgotten], rule.tolerances[forgotten] + TOLERANCE
    assert value is not None
    goal = target[forgotten] if rule.two_sided else 0.0
    damage = any(
        _lost(cell, target, rule, name) for name in (rule.axes.retained, rule.axes.utility)
    )
    damage |= rule.two_sided and value < goal - tolerance
    return (UNDER if value > goal + tolerance else "") + (DAMAGE if damage else "")


def _lost(cell: Cell, target: Target, rule: Acceptance, metric: str) -> bool:
    value = cell.metrics[metric]
    assert value is not None
    return value < target[metric] - rule.tolerances[metric] - TOLERANCE


Judged = Sequence[tuple[Cell, str]]
"""Cells, and why each fails."""
K = TypeVar("K", float, tuple[float, int], tuple[float, float], tuple[float, float, int])


@dataclass(frozen=True)
class BestCell:
    """The setting accepted on most seeds, among those the one with the highest mean utility.

    Picked on the numbers that are shown, so optimistic; one setting for all seeds, not one each.
    """

    lr: float
    lam: float
    step: int
    seeds: int
    utility: Summary


def values_of(cells: Iterable[Cell], metric: str) -> list[float]:
    """Of the cells that did not diverge."""
    values = (cell.metrics.get(metric) for cell in cells)
    return [value for value in values if value is not None]


def grouped(judged: Judged, key: Callable[[Cell], K]) -> list[tuple[K, Judged]]:
    """Cells of one key together, keys ascending."""
    groups: dict[K, list[tuple[Cell, str]]] = {}
    for cell, mark in judged:
        groups.setdefault(key(cell), []).append((cell, mark))
    return sorted(groups.items(), key=lambda pair: pair[0])


def best_cell(shared: Judged, utility: str) -> BestCell | None:
    """Of the cells that all rows share; None where none is accepted."""
    candidates = []
    for place, group in grouped(shared, lambda cell: (cell.lr, cell.lam, cell.step)):
        accepted = sum(not mark for _, mark in group)
        if accepted:
            values = values_of((cell for cell, _ in group), utility)
            candidates.append(BestCell(*place, accepted, summarise(values)))
    return max(candidates, key=lambda best: (best.seeds, best.utility.mean), default=None)
