"""Methods that move inputs or look at gradients by the input: AMUN, MU-Mis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.gradient import GradientMethod, ShortConfig
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.objectives.objectives import Objective


class AMUN(GradientMethod):
    """AMUN: train on the nearest adversarial examples of the forget set, with the labels they get.

    Formula: x' = x moved along grad_x CE(O(x), y) of length 1, in ``attack_steps`` steps of
    radius / attack_steps; the radius is doubled from ``radius`` on until argmax O(x') != y, at most
    ``doublings`` times; minimise CE(f(x'), argmax O(x')) + w_r CE(B_r), O = Original, frozen.
    Source: Ebrahimpour-Boroojeny et al. 2025 (arXiv 2503.00917, ICML); its algorithm 1 searches
    the radius in this way.
    """

    info = MethodInfo(
        1, "AMUN, Ebrahimpour-Boroojeny et al. 2025 (arXiv 2503.00917)", BOTH, modality="vision"
    )

    class Config(ShortConfig):
        """Settings of AMUN.

        Attributes:
            radius: First length of the move, in units of the model's input; .5 is ours.
            doublings: How often the length may be doubled; 6 is ours.
            attack_steps: Steps of a move; 5 is ours.
            retain_weight: Factor of the retain term; 1, torchunlearn's.
        """

        epochs_of: str | None = "retain"
        radius: Positive = 0.5
        doublings: Count = 6
        attack_steps: Count = 5
        retain_weight: NonNegative = 1.0

    def prepare(self, task: UnlearnTask) -> Objective:
        """Cross-entropy on the adversarial examples and on retain."""
        from stable_forgetting.vision.methods.adversarial import Adversarial

        config: Any = self.config
        return Adversarial(
            task.forward,
            task.frozen_copy(),
            config.radius,
            config.doublings,
            config.attack_steps,
            config.retain_weight,
        )


class MUMis(UnlearningMethod):
    """MU-Mis: make the true logit as insensitive to the input as another one; forget data alone.

    Formula: minimise mean over B_f of ||grad_x z_y||^2 - w ||grad_x z_c||^2, c a random other class
    of each sample and step.  It takes second derivatives, which the bounded layer does not have.
    Source: Cheng et al. 2024 (arXiv 2402.15109); Harry24k/machine-unlearning-pytorch (mumis.py).
    """

    info = MethodInfo(
        1, "MU-Mis, Cheng et al. 2024 (arXiv 2402.15109)", frozenset({"forget"}), modality="vision"
    )

    class Config(FitConfig):
        """Settings of MU-Mis.

        Attributes:
            other_weight: Weight of the other logit's sensitivity; 1, as published.
        """

        epochs: Count | None = 5
        batch_size: Count = 64
        lr: Positive = 1e-4
        other_weight: NonNegative = 1.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains on the difference of the two sensitivities."""
        from stable_forgetting.vision.methods.adversarial import Sensitivity

        engine = FitConfig.of(self.config)
        objective = Sensitivity(self.config.other_weight)
        task.fit(task.model, objective, task.loaders(["forget"], engine), engine)
        return task.model
