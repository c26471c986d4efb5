"""Gradient difference; its adapted forms are rows of :mod:`common.methods.variants`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.base.numbers import Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import PAPER_LITERAL, GradientConfig, GradientMethod
from stable_forgetting.common.methods.simple import BOTH

if TYPE_CHECKING:
    from stable_forgetting.common.objectives.objectives import Objective


class GradientDifference(GradientMethod):
    """GD: descend on retain and ascend on forget, all parameters trained.

    Formula: minimise CE(B_r) - lambda CE(B_f); B_r and B_f share one forward.
    Source: Liu et al. 2022; the paper's eq. "gradient difference".
    """

    info = MethodInfo(1, "Liu et al. 2022 (arXiv 2203.12817); the paper, eq. 2", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_LITERAL

    class Config(GradientConfig):
        lr: Positive = 1e-4

    def objective(self) -> Objective:
        """The weighted or the two-rate reading."""
        from stable_forgetting.common.objectives.objectives import gradient_difference

        config = self.config
        two_rates = config.reading == "two_rates"
        retain, forget = (config.alpha_r, config.alpha_f) if two_rates else (1.0, config.lam)
        return gradient_difference(retain, forget, config.forget_loss, config.average)
