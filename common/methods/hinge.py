"""The inverted hinge loss, through every parametrisation, and LoKU, which starts it by FILA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from common.base.numbers import Positive
from common.bounded.config import AdapterConfig, FilaConfig
from common.bounded.presets import LORA, LORA_OMEGA, SINE, TANH
from common.methods.base import MethodInfo
from common.methods.forget_retain import ADAPTER_LR, ForgetRetainMethod, RetainConfig
from common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from common.objectives.objectives import Term

PAPER = "LoKU, Cha et al. 2024 (arXiv 2408.06621)"
BOTH = frozenset({"forget", "retain"})
PUBLISHED: Mapping[str, Any] = {
    "epochs": 5,
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


class IHL(ForgetRetainMethod):
    """IHL: the inverted hinge loss on forget, cross-entropy on retain; all parameters trained.

    Formula: minimise mean_t [1 + p(x_t) - max_{v != x_t} p(v)] on B_f + CE(B_r).  Its gradient by
    the logits is bounded by 1/2 and vanishes as p(x_t) -> 0.
    Source: arXiv 2408.06621; its repository (TOFU/dataloader.py), which averages over tokens.
    """

    info = MethodInfo(1, PAPER, BOTH)

    class Config(RetainConfig):
        average: Literal["samples", "tokens"] = "tokens"

    def forget_term(self, task: UnlearnTask) -> Term:
        """The inverted hinge."""
        from common.objectives.positions import inverted_hinge
        from common.objectives.terms import Mean

        return Mean(inverted_hinge, self.config.average)


class IHLLora(IHL):
    """IHL + LoRA: the inverted hinge through h = W0 x + (alpha/r) A B^T x + b."""

    info = MethodInfo(1, PAPER, BOTH)

    class Config(IHL.Config):
        lr: Positive = ADAPTER_LR
        adapter: AdapterConfig | None = LORA


class IHLLoraOmega(IHL):
    """IHL + LoRA with omega inside: the control for ``ihl_sine`` and ``ihl_tanh`` (ours)."""

    info = MethodInfo(1, "control (ours)", BOTH)

    class Config(IHL.Config):
        lr: Positive = ADAPTER_LR
        adapter: AdapterConfig | None = LORA_OMEGA


class IHLSine(IHL):
    """IHL + Sine: the inverted hinge through h = W0 x + (alpha/r) sin(omega A B^T) x + b."""

    info = MethodInfo(1, PAPER + "; Stable Forgetting, ablation of IHL", BOTH)

    class Config(IHL.Config):
        lr: Positive = ADAPTER_LR
        adapter: AdapterConfig | None = SINE


class IHLTanh(IHL):
    """IHL + Tanh: the inverted hinge through h = W0 x + (alpha/r) tanh(omega A B^T) x + b."""

    info = MethodInfo(1, PAPER, BOTH)

    class Config(IHL.Config):
        lr: Positive = ADAPTER_LR
        adapter: AdapterConfig | None = TANH


class LoKU(IHL):
    """LoKU: the inverted hinge and retain cross-entropy through LoRA that starts by FILA.

    Formula: minimise IHL(B_f) + CE(B_r) over A, B of W - s B0 A0 + s B A, with s B0 A0 the
    Fisher-weighted rank-r optimum of W (see :mod:`common.methods.tools.fila`).  Presets hold the
    repository's settings for Phi-1.5 and LLaMA-2-7B on TOFU.
    Source: arXiv 2408.06621; the repository csm9493/efficient-llm-unlearning.
    """

    info = MethodInfo(1, PAPER, BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tofu_phi": {**_published(4, 2e-4), "fila": {"compat": "loku", "batch_size": 4}},
        "tofu_llama2": {**_published(4, 1e-4), "fila": {"compat": "loku", "batch_size": 2}},
    }

    class Config(IHL.Config):
        lr: Positive = 1e-3
        adapter: AdapterConfig | None = LORA
        fila: FilaConfig | None = FilaConfig()
