"""The inverted hinge loss; through adapters, and as LoKU, it is rows of the variants' table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, RetainConfig
from stable_forgetting.common.methods.simple import BOTH
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from stable_forgetting.common.objectives.terms import Term

PUBLISHED: Mapping[str, Any] = {
    "epochs": 5,
    "timing": "transformers",
    "average": "tokens",
    "forget_weight": 1.0,
    "batch_size": 32,
    "weight_decay": 0.01,
    "schedule": "linear",
    "warmup_epochs": 1.0,
    "lr_scaling": "none",
}


def _published(rank: int, lr: float) -> Mapping[str, Any]:
    """The repository's TOFU settings."""
    return {
        **PUBLISHED,
        "lr": lr,
        "adapter": {"rank": rank, "alpha": 2.0 * rank, "placement": "all"},
    }


TOFU_LORA: Mapping[str, Mapping[str, Any]] = {
    "tofu_phi": _published(4, 2e-4),
    "tofu_llama2": _published(4, 1e-4),
}
"""LoKU's, for what it trains through LoRA alone: 62, 31 and 6 steps on forget10, 05 and 01."""
TOFU_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tofu_phi": {**TOFU_LORA["tofu_phi"], "fila": {"compat": "loku", "batch_size": 4}},
    "tofu_llama2": {**TOFU_LORA["tofu_llama2"], "fila": {"compat": "loku", "batch_size": 2}},
}
"""The same with FILA."""


class IHL(ForgetRetainMethod):
    """IHL: the inverted hinge loss on forget, cross-entropy on retain; all parameters trained.

    Formula: minimise mean_t [1 + p(x_t) - max_{v != x_t} p(v)] on B_f + CE(B_r).  Its gradient by
    the logits is bounded by 1/2 and vanishes as p(x_t) -> 0.
    Source: arXiv 2408.06621; its repository (TOFU/dataloader.py), which averages over tokens.
    """

    info = MethodInfo(1, "LoKU, Cha et al. 2024 (arXiv 2408.06621)", BOTH)

    class Config(RetainConfig):
        average: Literal["samples", "tokens"] = "tokens"

    def forget_term(self, task: UnlearnTask) -> Term:
        """The inverted hinge."""
        from stable_forgetting.common.objectives.positions import inverted_hinge
        from stable_forgetting.common.objectives.terms import Mean

        return Mean(inverted_hinge, self.config.average)
