"""Methods that add noise to the weights and train it away again: UNDO, Langevin unlearning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, RETAIN, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.finetuning import RepairConfig, repaired
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig, Optimizer, total_steps

if TYPE_CHECKING:
    from torch import Tensor, nn


class Undo(UnlearningMethod):
    """UNDO: unlearn, add noise to the weights, and learn the unlearned model's outputs anew.

    Formula: a share of the steps minimises CE(B_r) - lambda CE(B_f), which gives theta_u; theta <-
    (1 - alpha) theta_u + alpha beta n, n uniform in +-sqrt(6 / (rows + columns)) for matrices and
    kernels (Xavier), 0 for vectors; then minimise KL(p_u || p)(B_r) + w KL(p_u || p)(B_f), p_u the
    softmax at theta_u, which is frozen. Both trainings read one order of batches. The source may
    also unlearn by RMU or by maximal entropy.
    Source: Lee et al. 2025 (arXiv 2506.06278, NeurIPS); AddieFoote/distillation-robustify-
    unlearning (partial_distill_langarith.py: beta .1, alpha .1 to .8, forget and retain data
    distilled alike).
    """

    info = MethodInfo(2, "UNDO, Lee et al. 2025 (arXiv 2506.06278)", BOTH)

    class Config(RepairConfig):
        """Settings of UNDO.

        Attributes:
            unlearn_share: Share of the steps that unlearn; .25 is ours.
            unlearn_lr: Rate of these steps; 1e-4, gradient difference's.
            forget_weight: Factor of the ascent, lambda; .1, gradient difference's.
            alpha: How far the weights go to the noise; .5 is inside the published sweep.
            beta: Size of the noise; .1, as published.
            distil_forget: Factor of the divergence on forget data; 1, as published; 0 leaves it
                out.
        """

        epochs_of: str | None = "retain"
        unlearn_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
        unlearn_lr: Positive = 1e-4
        forget_weight: NonNegative = 0.1
        alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
        beta: NonNegative = 0.1
        distil_forget: NonNegative = 1.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Unlearns, adds the noise, distils."""
        config: Any = self.config
        engine = FitConfig.of(config)
        total = total_steps(engine, task.loaders(["retain"], engine))
        first = max(1, round(config.unlearn_share * total))
        ascent = objectives.gradient_difference(
            forget_weight=config.forget_weight, over=engine.average
        )
        self._fit(task, ascent, steps=first, lr=config.unlearn_lr, more=True)
        term = objectives.divergence_from(task.reference(), engine.average)
        self._perturb(task)
        distilled = objectives.ForgetRetain(term, term, config.distil_forget)
        self._fit(task, distilled, steps=max(1, total - first), lr=config.lr)
        return task.model

    def _fit(
        self,
        task: UnlearnTask,
        objective: objectives.Objective,
        *,
        steps: int,
        lr: float,
        more: bool = False,
    ) -> None:
        engine = FitConfig.of(self.config, steps=steps, epochs=None, lr=lr)
        task.train(objective, engine, more=more)

    def _perturb(self, task: UnlearnTask) -> None:
        """Shrinks all weights and adds the noise."""
        import torch

        config: Any = self.config
        stream = task.generator("noise")
        with torch.no_grad():
            for parameter in (p for p in task.model.parameters() if p.requires_grad):
                noise = torch.zeros(parameter.shape)
                if noise.ndim >= 2:
                    torch.nn.init.xavier_uniform_(noise, generator=stream)
                parameter.mul_(1 - config.alpha)
                parameter.add_(config.alpha * config.beta * noise.to(parameter))


class Langevin(UnlearningMethod):
    """Langevin unlearning: keep training on retain with noise in every step, inside a ball.

    Formula: theta <- P(theta - lr clip(grad CE(B_r)) + sigma sqrt(2 lr) n), n standard normal, P
    the projection onto ||theta|| <= radius ||theta_0||; ``weight_decay`` is the source's l2 term.
    Never reads forget data.  The source proves a bound for full batches whose samples' gradients
    are clipped, when Original was trained in the same way; here the gradient of a batch is clipped,
    and nothing is proved.  Its code scales to the sphere in every step.
    Source: Chien et al. 2024 (arXiv 2401.10371, NeurIPS); Graph-COM/Langevin_unlearning
    (langevin.py).
    """

    info = MethodInfo(1, "Chien et al. 2024 (arXiv 2401.10371)", RETAIN, reading=True)

    class Config(RepairConfig):
        """Settings of Langevin unlearning.

        Attributes:
            lr: Step size; 1e-2 is ours.  The noise takes it as it is here, whatever the schedule.
            sigma: Size of the noise; .03, as published.
            radius: Of the ball, in lengths of Original's weights; 1 is ours.
            max_grad_norm: Largest length of a step's gradient; 1, as published.
        """

        optimizer: Optimizer = "sgd"
        lr: Positive = 1e-2
        sigma: NonNegative = 0.03
        radius: Positive = 1.0
        max_grad_norm: Positive | None = 1.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes; after each step come noise and projection."""
        import torch

        config: Any = self.config
        parameters = [p for p in task.model.parameters() if p.requires_grad]
        radius, size = config.radius * length(parameters), config.sigma * (2 * config.lr) ** 0.5

        @torch.no_grad()
        def disturbed(model: nn.Module) -> None:
            for parameter in parameters:
                noise = torch.randn(parameter.shape)  # the engine's stream
                parameter.add_(size * noise.to(parameter))
            factor = (radius / length(parameters)).clamp_max(1)
            for parameter in parameters:
                parameter.mul_(factor)

        return repaired(task, config, after_step=[disturbed])


def length(parameters: Sequence[nn.Parameter]) -> Tensor:
    """||theta|| over all of them, in float32 or wider, without a gradient."""
    import torch

    return (
        torch.stack([objectives.wide(p.detach()).square().sum() for p in parameters]).sum().sqrt()
    )
