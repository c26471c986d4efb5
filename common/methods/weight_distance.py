"""Away from the weights of Original, whatever is to be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.methods.task import UnlearnTask

EPS = 1e-8
"""Below the root: the distance has a gradient where it is 0."""


class WeightDistance(UnlearningMethod):
    """Weight Dist Reg: keep training on retain while the weights go away from Original's.

    Formula: minimise CE(B_r) - a sqrt(mean((theta - theta_0)^2) + 1e-8); the mean runs over all
    parameters, norms and biases included, and theta_0 is Original.  Never reads forget data: what
    is not trained on is what gets lost.  It is the opposite of a bound on ||dW||: the distance to
    Original is what predicts resistance to relearning.

    Source: Siddiqui et al. 2025, arXiv 2505.22310 (there ``weight_dist_reg``, a = 1; its
    ``weight_distortion`` is noise on the weights instead); the vision_relearning repository.
    Deviation: AdamW's rates here suit small models from scratch; sweep lr from 1e-4 to 1e-2, and a.
    """

    info = MethodInfo(1, "Siddiqui et al. 2025 (arXiv 2505.22310)", frozenset({"retain"}))

    class Config(FitConfig):
        """Settings of Weight Dist Reg.

        Attributes:
            a: Weight of the distance; 1, as published.
        """

        epochs: Count | None = 3
        batch_size: Count = 64
        lr: Positive = 1e-3
        a: NonNegative = 1.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes with the distance as a reward."""
        from stable_forgetting.common.objectives.objectives import CrossEntropy

        config: Any = self.config
        engine = FitConfig.of(config)
        start = [parameter.detach().clone() for parameter in task.model.parameters()]

        def penalty(model: nn.Module) -> Tensor:
            away: Tensor = -config.a * distance(model, start)
            return away

        objective = CrossEntropy("retain", engine.average)
        task.fit(task.model, objective, task.loaders(["retain"], engine), engine, penalty=penalty)
        return task.model


def distance(model: nn.Module, start: list[Tensor]) -> Tensor:
    """sqrt(mean((theta - theta_0)^2) + eps) over all parameters.

    Args:
        model: Its parameters are theta.
        start: theta_0, in their order.
    """
    import torch

    parameters = list(model.parameters())
    squares = [(p - s).square().sum() for p, s in zip(parameters, start, strict=True)]
    return (torch.stack(squares).sum() / sum(p.numel() for p in parameters) + EPS).sqrt()
