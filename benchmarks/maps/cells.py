"""Cells of a map and the rule that accepts or fails them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from stable_forgetting.common.measure.metric import MapAxes

UNDER, DAMAGE = "U", "D"
TOLERANCE = 1e-9
"""Percentages are sums of float32; a cell on the rule's edge is inside."""

Target = Mapping[str, float]
"""What Retrain of the same seed scores: metric -> value."""


@dataclass(frozen=True)
class Rule:
    """When a cell is acceptable, in the units of its metrics.

    Formula: retained >= Retrain - tolerance and utility >= Retrain - tolerance and forgotten <=
    tolerance, or, two-sided, |forgotten - Retrain| <= tolerance.

    Attributes:
        tolerances: Metric -> tolerance, for these three.
        two_sided: For random forgetting, where Retrain's own value is far from 0.
    """

    axes: MapAxes
    tolerances: Mapping[str, float]
    two_sided: bool = False

    def scaled(self, factor: float) -> Rule:
        """The strict (0.5) or the loose (2) rule."""
        scaled = {metric: factor * value for metric, value in self.tolerances.items()}
        return Rule(self.axes, scaled, self.two_sided)


@dataclass(frozen=True)
class Cell:
    """One run at one step.

    Attributes:
        extension: Outside the grid that all rows share: for edges and bands only.
        lr: Effective rate.
        lam: Value of the row's second axis.
        metrics: Metric of the map -> value, None where the run diverged.
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


def judge(cell: Cell, target: Target, rule: Rule) -> str:
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


def _lost(cell: Cell, target: Target, rule: Rule, metric: str) -> bool:
    value = cell.metrics[metric]
    assert value is not None
    return value < target[metric] - rule.tolerances[metric] - TOLERANCE


Judged = Sequence[tuple[Cell, str]]
