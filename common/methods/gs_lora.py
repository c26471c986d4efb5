"""GS-LoRA: bounded forgetting through LoRA whose blocks are switched off where they do little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.bounded.config import LORA, AdapterConfig
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, RetainConfig
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.train.protocols import AfterStep


class GSLora(ForgetRetainMethod):
    """GS-LoRA: group-sparse LoRA on the MLPs, ascent on forget up to a bound, descent on retain.

    Formula: minimise w_f max(0, bound - CE(B_f)) + w_r CE(B_r) + alpha sum_g sqrt(sum over the
    layers l of block g of ||A_l||_F^2 + ||B_l||_F^2); a block is what holds its layers, the MLP of
    one block of a transformer.  The bound is on the mean over the batch.
    Here one request; the paper's are in turn, each with its own LoRA.  Its scripts have bounds of
    105 to 110, for faces under CosFace, and some start with another alpha; here alpha is fixed.
    Source: Zhao et al. 2024 (arXiv 2403.11530, CVPR); bjzhb666/GS-LoRA (engine_cl.py).
    """

    info = MethodInfo(1, "GS-LoRA, Zhao et al. 2024 (arXiv 2403.11530)", BOTH)

    class Config(RetainConfig):
        """Settings of GS-LoRA.

        Attributes:
            bound: Cross-entropy on forget, in nats, above which nothing is pushed any more; 10, the
                code's default.
            alpha: Weight of the groups' norms; 1e-4, its script's.
            forget_weight: Factor of the forget term, the source's beta; .15, its script's.
            lr: Of the factors; 3e-3 is ours, as for gradient difference through LoRA.
            adapter: Plain LoRA of rank 8 on the MLPs, as published; its alpha / r of 2 is ours.
        """

        lr: Positive = 3e-3
        forget_weight: NonNegative = 0.15
        bound: Positive = 10.0
        alpha: NonNegative = 1e-4
        adapter: AdapterConfig | None = LORA

        @model_validator(mode="after")
        def _factors_are_ours(self) -> GSLora.Config:
            if self.adapter is None or self.adapter.peft or self.fila is not None:
                raise ValueError(
                    "gs_lora weighs the factors of our own adapters from zero on; give adapter, "
                    "without peft and fila"
                )
            return self

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """What the cross-entropy lacks of the bound."""
        loss, bound = objectives.Mean(objectives.cross_entropy, self.over), self.config.bound
        return lambda logits, batch: (bound - loss(logits, batch)).clamp_min(0)

    def _constraints(self, *after_step: AfterStep) -> dict[str, Any]:
        constraints = super()._constraints(*after_step)
        other, alpha = constraints["penalty"], self.config.alpha

        def penalty(model: nn.Module) -> Tensor:
            lasso: Tensor = alpha * group_norms(model).sum()
            return lasso if other is None else lasso + other(model)

        return {**constraints, "penalty": penalty}


def group_norms(model: nn.Module) -> Tensor:
    """(G,) norms of all factors of each block's adapters, differentiable."""
    import torch

    from stable_forgetting.common.bounded.layer import adapted_layers

    groups: dict[str, list[Tensor]] = {}
    for name, layer in adapted_layers(model):
        block = groups.setdefault(name.rpartition(".")[0], [])
        block += [layer.A.flatten(), layer.Bt.flatten()]
    return torch.stack([torch.linalg.vector_norm(torch.cat(group)) for group in groups.values()])
