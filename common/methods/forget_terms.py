"""Forget terms that are bounded or that fade: ME, IHL, UNDIAL, WGA, SatImp, CE-U, DELETE; FILA."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.numbers import Amount, NonNegative, Positive
from stable_forgetting.common.bounded.config import LORA, AdapterConfig, FilaConfig
from stable_forgetting.common.methods.base import BOTH, FORGET, MethodInfo
from stable_forgetting.common.methods.forget_retain import (
    ForgetConfig,
    ForgetRetainMethod,
    PaddedConfig,
    RetainConfig,
)
from stable_forgetting.common.methods.task import UnlearnTask


class MEGD(ForgetRetainMethod):
    """ME + GD: maximise the entropy of forget answers, descend on retain.

    Formula: minimise w_f mean KL(U || p_theta)(B_f) + CE(B_r); the minimum of the first is the
    uniform distribution.
    ``compat: published`` is the repository's default ``mask: false``: the entropy runs over the
    question, the answer and the padding up to ``data.max_length`` (500 there) but for the last
    position, with 1e-12 inside the logarithm, and cross-entropy is averaged over tokens.
    Source: arXiv 2410.08109; sail-sg/closer-look-LLM-unlearning (w_f 0.1 on TOFU, 1 in sequences).
    """

    info = MethodInfo(1, "ME+GD, Yuan et al. 2025 (arXiv 2410.08109)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tofu_llama2": {
            "compat": "published",
            "lr": 1e-5,
            "epochs": 5,
            "batch_size": 32,
            "weight_decay": 0.01,
            "schedule": "linear",
            "warmup_epochs": 1.0,
            "timing": "transformers",
        }
    }

    class Config(PaddedConfig):
        padding = {"published": "max_length"}
        forget_weight: NonNegative = 0.1
        compat: Literal["none", "published"] = "none"

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """The divergence from uniform."""
        floor = 1e-12 if self.config.compat == "published" else 0.0
        return objectives.Mean(partial(objectives.divergence_from_uniform, floor=floor), self.over)

    def views(self, task: UnlearnTask) -> Mapping[str, Callable[[data.Batch], data.Batch]]:
        """Every position of forget texts, as published."""
        if self.config.compat != "published":
            return {}
        every = data.every_position(task.source, self.config.pad_to)
        return {"forget": lambda batch: data.predicting(every(batch))}


class Delete(ForgetRetainMethod):
    """DELETE: Original's distribution over the other answers, on forget data alone.

    Formula: minimise mean KL(softmax(z_O with z_y = -inf) || p_theta) on B_f, z_O the logits of
    Original, which is frozen.  It is ``ceu`` with a fixed teacher.  Never reads retain data.
    Source: Zhou et al. 2025 (arXiv 2503.23751, CVPR), decoupled distillation to erase.
    """

    info = MethodInfo(1, "DELETE, Zhou et al. 2025 (arXiv 2503.23751)", FORGET)
    Config = ForgetConfig

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """Distillation without the label; cross-entropy has the divergence's gradient."""
        return objectives.self_distillation(task.reference(), math.inf, self.over)


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

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """The inverted hinge."""
        return objectives.Mean(objectives.inverted_hinge, self.config.average)


PAPER = "LoKU, Cha et al. 2024 (arXiv 2408.06621), ablation"


class GAFila(ForgetRetainMethod):
    """GA + FILA: ascent on forget through LoRA that starts by FILA.

    Formula: minimise -CE(B_f).  Only the start reads retain data: its Fisher information.
    Source: arXiv 2408.06621.
    """

    info = MethodInfo(2, PAPER, BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = TOFU_PRESETS

    class Config(ForgetConfig):
        lr: Positive = 3e-5
        adapter: AdapterConfig | None = LORA
        fila: FilaConfig | None = FilaConfig()


class GDFila(ForgetRetainMethod):
    """GD + FILA: gradient difference through LoRA that starts by FILA.

    Formula: minimise CE(B_r) - lambda CE(B_f), lambda = ``forget_weight`` (1 in the source).
    Source: arXiv 2408.06621.
    """

    info = MethodInfo(2, PAPER, BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = TOFU_PRESETS

    class Config(RetainConfig):
        lr: Positive = 1e-3
        forget_weight: NonNegative = 0.2
        adapter: AdapterConfig | None = LORA
        fila: FilaConfig | None = FilaConfig()


class Undial(ForgetRetainMethod):
    """UNDIAL: learn Original's distribution with the label's logit lowered.

    Formula: minimise mean CE(softmax(z_ref - strength e_y), p_theta) on B_f; no retain data.
    ``compat: openunlearning`` averages over every position, the question's and the padding's too
    (to the longest text of the batch), as that code does; where a position has no label, the logit
    of the hundredth entry from the vocabulary's end is lowered.
    Source: arXiv 2402.10052; open-unlearning (strength 10, retain weight 0).
    """

    info = MethodInfo(1, "UNDIAL, Dong et al. 2024 (arXiv 2402.10052)", FORGET)

    class Config(ForgetConfig):
        """Settings of UNDIAL.

        Attributes:
            strength: What is taken off the label's logit; 10, open-unlearning's.
            compat: ``openunlearning``: as its code computes it.
        """

        later: ClassVar[Mapping[str, Any]] = {**ForgetConfig.later, "compat": "none"}
        average: Literal["samples", "tokens"] = "tokens"
        strength: Positive = 10.0
        compat: Literal["none", "openunlearning"] = "none"

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """Self-distillation."""
        config, masked = self.config, self.config.compat == "none"
        over: objectives.Average = config.average if masked else "tokens"
        return objectives.self_distillation(task.reference(), config.strength, over, masked)

    def views(self, task: UnlearnTask) -> Mapping[str, Callable[[data.Batch], data.Batch]]:
        """Every position of forget texts, with ``compat``; those without a label are marked."""
        if self.config.compat == "none":
            return {}
        every = data.every_position(task.source, "batch")
        return {"forget": lambda batch: data.predicting(data.with_labels_of(every(batch), batch))}


class WGA(ForgetRetainMethod):
    """WGA: ascent weighted by the confidence in the label, so that it fades when forgotten.

    Formula: minimise -mean p^beta CE on B_f (p without gradient) + CE(B_r).
    Source: arXiv 2502.19301; open-unlearning (beta 1).
    """

    info = MethodInfo(1, "WGA, Wang et al. 2025 (arXiv 2502.19301)", BOTH)

    class Config(RetainConfig):
        """Settings of WGA.

        Attributes:
            beta: Power of the label's probability in the weight; 1, open-unlearning's.
        """

        average: Literal["samples", "tokens"] = "tokens"
        beta: NonNegative = 1.0

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """Weighted ascent."""
        return objectives.weighted_ascent(self.config.beta, 0.0, self.config.average)


class SatImp(ForgetRetainMethod):
    """SatImp: ascent weighted by saturation and importance.

    Formula: minimise w_f * -mean p^beta1 (1 - p)^beta2 CE on B_f (p without gradient) + CE(B_r).
    Source: arXiv 2505.11953; open-unlearning (beta1 5, beta2 1, w_f 0.1).
    """

    info = MethodInfo(1, "SatImp, Yang et al. 2025 (arXiv 2505.11953)", BOTH)

    class Config(RetainConfig):
        """Settings of SatImp.

        Attributes:
            beta1: Power of the label's probability in the weight; 5, open-unlearning's.
            beta2: Power of its complement in the weight; 1, open-unlearning's.
        """

        average: Literal["samples", "tokens"] = "tokens"
        forget_weight: NonNegative = 0.1
        beta1: NonNegative = 5.0
        beta2: NonNegative = 1.0

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """Weighted ascent."""
        return objectives.weighted_ascent(self.config.beta1, self.config.beta2, self.config.average)


class CEU(ForgetRetainMethod):
    """CE-U: learn the model's own distribution without the label; no retain data.

    Formula: minimise mean CE(softmax(z with z_y = -inf, no gradient), p_theta) on B_f.
    ``skip_first: 1`` leaves out the first answer position, as the published code does.
    Source: arXiv 2503.01224; open-unlearning.
    """

    info = MethodInfo(1, "CE-U, Yang 2025 (arXiv 2503.01224)", FORGET)

    class Config(ForgetConfig):
        """Settings of CE-U.

        Attributes:
            skip_first: Answer positions that are left out at the beginning; 0, as in the formula.
        """

        average: Literal["samples", "tokens"] = "tokens"
        skip_first: Amount = 0

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """Towards the other answers."""
        return objectives.without_the_label(self.config.skip_first, self.config.average)
