"""Cells of a map and the rule that accepts or fails them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.maps.config import Rule

UNDER, DAMAGE = "U", "D"
TOLERANCE = 1e-9
"""Percentages are sums of float32; a cell on the rule's edge is inside."""


@dataclass(frozen=True)
class Cell:
    """One run at one step; accuracies in percent, None where the run diverged.

    Attributes:
        label: Row.
        seed: Of the run.
        extension: Outside the grid that all rows share: for edges and bands only.
        lr: Effective rate.
        lam: Value of the row's second axis.
        step: Optimizer steps done.
        fa: Accuracy on the forget set.
        ra: Accuracy on the retain set.
        ta: Test accuracy.
        forget_loss: Mean cross-entropy on the forget set, in nats.
        delta_ratio: ||dW||_F / ||W0||_F over the changed matrices.
        bound_share: Share of (step, layer) pairs at the ball, or of entries inside the bound's
            curved part; None without a bound.
        nonfinite: The run had diverged.
    """

    label: str
    seed: int
    extension: bool
    lr: float
    lam: float
    step: int
    fa: float | None
    ra: float | None
    ta: float | None
    forget_loss: float | None
    delta_ratio: float | None
    bound_share: float | None
    nonfinite: bool


@dataclass(frozen=True)
class Target:
    """What Retrain of the same seed scores."""

    fa: float
    ra: float
    ta: float
    forget_loss: float


@dataclass(frozen=True)
class Edge:
    """One end of the learning-rate axis.

    Attributes:
        lr: The outermost column that was run; None while that is not known.
        found: Whether no cell of that column is accepted, so that the band ends before it.
    """

    lr: float | None
    found: bool


def judge(cell: Cell, target: Target, rule: Rule) -> str:
    """Why a cell fails: U (FA too high), D (RA, TA or a two-sided FA too low; diverged), or ""."""
    if cell.nonfinite:
        return DAMAGE
    assert cell.fa is not None and cell.ra is not None and cell.ta is not None
    goal = target.fa if rule.two_sided else 0.0
    under = cell.fa > goal + rule.fa + TOLERANCE
    damage = cell.ra < target.ra - rule.ra - TOLERANCE or cell.ta < target.ta - rule.ta - TOLERANCE
    damage |= rule.two_sided and cell.fa < goal - rule.fa - TOLERANCE
    return (UNDER if under else "") + (DAMAGE if damage else "")


Judged = Sequence[tuple[Cell, str]]
