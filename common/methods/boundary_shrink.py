"""Boundary Shrink: give forget data to the class across the nearest boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import GradientMethod, ShortConfig

if TYPE_CHECKING:
    from stable_forgetting.common.methods.task import UnlearnTask
    from stable_forgetting.common.objectives.objectives import Objective


class BoundaryShrink(GradientMethod):
    """Boundary Shrink: relabel forget data with the neighbouring class, found by one attack step.

    Formula: c = Original (frozen, eval mode), inputs in [low, high],
        x' = clip(x + d (high - low) sign(grad_x CE(c(x), y)), low, high);   y' = argmax c(x')
        minimise CE(f(x), y') for x in D_f
    d is ``attack_step``.  For images [low, high] is the normalised [0, 1] per channel, so that d is
    in pixel units; a source that gives no bounds has those observed on D_f.  y' may still be y
    where the step is too short.  Never reads retain data.

    Source: Chen et al. 2023, arXiv 2303.11570; its repository (d 0.1, 10 epochs of SGD, lr 1e-5).
    Sweep lr.
    """

    info = MethodInfo(1, "Chen et al. 2023 (arXiv 2303.11570)", frozenset({"forget"}))

    class Config(ShortConfig):
        """Settings of Boundary Shrink.

        Attributes:
            attack_step: Length of the attack step, as a share of the range of inputs; .1, as in the
                repository.
        """

        epochs: Count | None = 10
        lr: Positive = 1e-5
        weight_decay: NonNegative = 0.0
        attack_step: Positive = 0.1

    def prepare(self, task: UnlearnTask) -> Objective:
        """Cross-entropy of the forget set towards its neighbours."""
        from stable_forgetting.common.methods.tools.objectives import ToNeighbours

        return ToNeighbours.of(task, self.config.attack_step)
