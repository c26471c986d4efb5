"""A linear adapter as a LoRA adapter of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.files import FACTORS, START, AdapterState
from stable_forgetting.common.bounded.phi import PHIS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name of a tensor, where PEFT wraps a model."""


def write_peft(state: AdapterState, folder: Path, *, base: str, task: str | None = None) -> str:
    """Writes an adapter as ``PeftModel.from_pretrained(base, folder)`` reads it.

    With a start, dW = s omega (A B^T - A0 B0^T) is a LoRA adapter of twice the rank.

    Args:
        state: Of an adapter; the base weights are not in it.
        folder: Of the files; other files there are left.
        base: Folder or hub id of the model that the adapter is for.
        task: PEFT's task type, such as ``CAUSAL_LM``.

    Returns:
        Why nothing was written; empty where it was.
    """
    config, layers = AdapterConfig.model_validate(state.meta["config"]), [*state.meta["layers"]]
    reason = _why_not(config, state)
    if reason:
        return reason
    tensors: dict[str, Tensor] = {}
    for name in layers:
        out, into = _factors(state.tensors, name)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = into.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = out.contiguous()
    rank = len(next(iter(tensors.values())))
    about: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": config.scale * config.omega * rank,
        "lora_dropout": config.dropout,
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")
    return ""


def _why_not(config: AdapterConfig, state: AdapterState) -> str:
    if not PHIS[config.phi].linear:
        return f"{config.phi} is not linear, and LoRA is"
    layers, starts = state.meta["layers"], set(state.meta["starts"])
    if starts and starts != set(layers):
        return "some of its layers have a start and some have none"
    keys = (*FACTORS, *START)
    more = sorted(set(state.tensors) - {f"{name}.{key}" for name in layers for key in keys})
    return f"{more[0]} is trained beside it" if more else ""


def _factors(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """(k, r) and (r, d), whose product times the scale is dW."""
    a, b, *start = (tensors.get(f"{name}.{key}") for key in (*FACTORS, *START))
    assert a is not None and b is not None, "every layer has its factors"
    if start[0] is None or start[1] is None:
        return a, b
    return torch.cat([a, -start[0]], 1), torch.cat([b, start[1]])
