"""Adapter presets: LoRA, its control, sine, tanh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.bounded.config import AdapterConfig

if TYPE_CHECKING:
    pass


LORA = AdapterConfig()
LORA_OMEGA = AdapterConfig(omega=100.0)
SINE = AdapterConfig(phi="sine", omega=100.0)
TANH = AdapterConfig(phi="tanh", omega=100.0)
