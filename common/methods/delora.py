"""Gradient difference through DeLoRA, peft's low-rank adapter of bounded norm."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.bounded.config import AdapterConfig, Placement
from stable_forgetting.common.methods.base import BOTH, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.gradient import adapter_targets
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn


class GDDelora(UnlearningMethod):
    """GD + DeLoRA: the norm of the update is a number of its own, whatever the factors are.

    Formula: h = W0 x + B diag(s / (r |a_i| |b_i|)) A (v * x) + b with a_i the rows of A, b_i the
    columns of B and v_j the norm of column j of W0, so that ||dW||_F <= s max_j v_j; minimise
    CE(B_r) - lambda CE(B_f).  peft's layer: B starts at 0 and its norms count as 1e-4 at least, so
    the first steps that are larger put the update on its bound.  s is trained with the factors
    unless ``train_bound`` is off.  The rate is that of the factors: they are normed, so no rate
    of another adapter makes the same first step in weight space.
    Source: Bini et al. 2025, arXiv 2503.18225; the layer of ``peft``.
    """

    info = MethodInfo(1, "Bini et al. 2025 (arXiv 2503.18225), through peft", BOTH, extra="peft")

    class Config(FitConfig):
        """Settings of GD + DeLoRA.

        Attributes:
            forget_weight: Factor of the forget term, the sources' lambda (``lam`` means the same).
            forget_loss: ``cross_entropy`` is ascent; ``unlikelihood`` is the saturating loss
                -log(1 - p_y).
            rank: r of A and B.
            strength: s, where it starts.  The bound is about s / sqrt(d) times ||W0||_F for a layer
                of d inputs; peft's default of 15 is far beyond that of a small model.
            train_bound: Train s too, as peft does; off makes the bound a certificate.
            placement: Which of the model's target patterns are adapted.
            targets: Glob patterns that replace the model's own for ``placement``.
        """

        aliases: ClassVar[Mapping[str, str]] = {"lam": "forget_weight"}
        stored: ClassVar[Mapping[str, str]] = {"forget_weight": "lam"}
        steps: Count | None = 100
        epochs_of: str | None = "forget"
        batch_size: Count = 32
        lr: Positive = 3e-3
        forget_weight: NonNegative = 0.1
        forget_loss: Literal["cross_entropy", "unlikelihood"] = "cross_entropy"
        rank: Count = 8
        strength: Positive = 2.0
        train_bound: bool = True
        placement: Placement = "mlp"
        targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains the factors and merges them."""
        from stable_forgetting.common.bounded.attach import detach

        self.info.require("gd_delora")
        config: Any = self.config
        engine = FitConfig.of(config)
        objective = objectives.gradient_difference(
            1.0, config.forget_weight, config.forget_loss, engine.average
        )
        attach_delora(task, config)
        if task.telemetry is not None and task.telemetry.evaluate_during is not None:
            evaluate = task.telemetry.evaluate_during

            def evaluate_merged(model: nn.Module, step: int) -> Mapping[str, float | None]:
                return evaluate(detach(copy.deepcopy(model)), step)

            task.telemetry = replace(task.telemetry, evaluate_during=evaluate_merged)
        task.train(objective, engine)
        return detach(task.model)


def attach_delora(task: UnlearnTask, config: GDDelora.Config) -> None:
    """Freezes ``task.model`` and puts peft's layers into it, in place; factors of the task's seed.

    Raises:
        ConfigError: A pattern matches nothing, or something that is not a linear layer.
    """
    from stable_forgetting.common.bounded.attach import attach

    patterns = adapter_targets(task, config.placement, config.targets)
    adapter = AdapterConfig(peft="delora", rank=config.rank, alpha=config.strength)
    attach(task.model, patterns, adapter, task.generator("adapter"))
    for name, parameter in task.model.named_parameters():
        if ".delora_lambda." in name:
            parameter.requires_grad_(config.train_bound)
