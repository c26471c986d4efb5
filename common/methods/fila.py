"""Gradient ascent and gradient difference through LoRA that starts by FILA: LoKU's ablations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.bounded.config import AdapterConfig, FilaConfig
from stable_forgetting.common.bounded.presets import LORA
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.forget_retain import (
    ForgetConfig,
    ForgetRetainMethod,
    RetainConfig,
)
from stable_forgetting.common.methods.hinge import TOFU_PRESETS
from stable_forgetting.common.methods.simple import BOTH

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
