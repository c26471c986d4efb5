"""Adapter presets: what is trained in the place of the whole model, as one table.

``METHOD_PRESET`` names any method with an adapter through any row: ``salun_sine``, ``npo_fila``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stable_forgetting.common.bounded.config import AdapterConfig, FilaConfig

LORA = AdapterConfig()
SINE = AdapterConfig(phi="sine", omega=100.0)


@dataclass(frozen=True)
class Preset:
    """One way to parametrise the update.

    Attributes:
        through: What the method goes through, to follow "through".
        params: Defaults of a method's config that it sets.
        reads: Parts that it reads besides those of the method.
        version: Raised as a method's is; it is added to that of the method.
    """

    through: str
    params: Mapping[str, Any]
    reads: frozenset[str] = field(default_factory=frozenset)
    version: int = 0


PRESETS: Mapping[str, Preset] = {
    "lora": Preset("plain LoRA: (alpha/r) A B^T, unbounded", {"adapter": LORA}),
    "lora_omega": Preset(
        "LoRA with sine's omega and initial step: the control of every bound",
        {"adapter": AdapterConfig(omega=100.0)},
    ),
    "tanh": Preset(
        "(alpha/r) tanh(omega A B^T)", {"adapter": AdapterConfig(phi="tanh", omega=100.0)}
    ),
    "sine": Preset("(alpha/r) sin(omega A B^T)", {"adapter": SINE}),
    "sigmoid": Preset(
        "a centred sigmoid of omega A B^T", {"adapter": AdapterConfig(phi="sigmoid", omega=100.0)}
    ),
    "relu": Preset("(alpha/r) relu(A B^T), unbounded", {"adapter": AdapterConfig(phi="relu")}),
    "clip": Preset(
        "omega A B^T clamped to [-c, c]", {"adapter": AdapterConfig(phi="clip", omega=100.0)}
    ),
    "weight_clip": Preset(
        "LoRA with A and B projected to [-c, c]", {"adapter": LORA, "weight_clip": 1.5}
    ),
    "sine_weight_clip": Preset(
        "sine with A and B projected to [-c, c]", {"adapter": SINE, "weight_clip": 1.5}
    ),
    "penalty": Preset("LoRA with mu ||A B^T||_F^2", {"adapter": LORA, "penalty": 1e-2}),
    "sine_relative": Preset(
        "sine with the bound scaled to the layer",
        {"adapter": AdapterConfig(phi="sine", bound="relative")},
    ),
    "tanh_relative": Preset(
        "tanh with the bound scaled to the layer",
        {"adapter": AdapterConfig(phi="tanh", bound="relative")},
    ),
    "tanh_tight": Preset(
        "tanh with a bound of the weights' own size, rms(W0) of each layer",
        {"adapter": AdapterConfig(phi="tanh", omega=100.0, bound="relative", c=1.0)},
    ),
    "lora_ball": Preset("LoRA in a ball ||dW|| <= c ||W0||", {"adapter": LORA, "ball": 0.25}),
    "fila": Preset(
        "LoRA that starts on what forget needs most (FILA)",
        {"adapter": LORA, "fila": FilaConfig()},
        frozenset({"retain"}),
        version=1,
    ),
}
