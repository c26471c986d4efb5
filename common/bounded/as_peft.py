"""Our adapters as LoRA of PEFT: linear ones exactly, bounded ones where a LoRA comes near."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.eager import Update
from stable_forgetting.common.bounded.files import FACTORS, START, AdapterState
from stable_forgetting.common.bounded.layer import bound_of
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.bounded.product import whole_delta

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before every name of a tensor, where PEFT wraps a model."""
TOLERANCE = 0.01
"""Largest error of a bounded update as a LoRA, as a share of the update's norm."""
WIDEST = 8
"""Its largest rank, as a multiple of the adapter's."""
Factors = Mapping[str, tuple[Tensor, Tensor]]


def write_peft(
    state: AdapterState,
    folder: Path,
    *,
    base: str,
    revision: str | None = None,
    task: str | None = None,
) -> dict[str, Any]:
    """Writes an adapter as ``PeftModel.from_pretrained(base, folder)`` reads it.

    With a start, dW = s omega (A B^T - A0 B0^T) is a LoRA adapter of twice the rank.  A bounded dW
    is the LoRA of the largest singular values, of the smallest rank that is within
    :data:`TOLERANCE`.

    Args:
        state: Of an adapter; the base weights are not in it.
        folder: Of the files; other files there are left.
        base: Folder or hub id of the model that the adapter is for.
        revision: Of a hub id.
        task: PEFT's task type, such as ``CAUSAL_LM``.

    Returns:
        ``peft``: why nothing was written; empty where it was.  Of a bounded one also ``peft_rank``
        and ``peft_error``, ||dW - dW'||_F / ||dW||_F over all layers.
    """
    reason = _why_not(state)
    if reason:
        return {"peft": reason}
    config = AdapterConfig.model_validate(state.meta["config"])
    about: dict[str, Any] = {}
    scale = config.scale * config.omega
    updates = {name: _update(state, config, name) for name in state.meta["layers"]}
    factors: Factors = {name: update.joined() for name, update in updates.items()}
    if not PHIS[config.phi].linear:
        factors, error = _nearest(updates, config.rank)
        scale, rank = 1.0, len(next(iter(factors.values()))[1])
        about = {"peft_rank": rank, "peft_error": error}
        if error > TOLERANCE:
            reason = (
                f"{config.phi} is not linear, and LoRA is: at rank {rank} it still misses "
                f"{100 * error:.0f} % of the update"
            )
            return {"peft": reason}
    folder.mkdir(parents=True, exist_ok=True)
    model = {"base_model_name_or_path": base, "revision": revision}
    _write(folder, factors, config, scale, {"task_type": task, **model})
    return {"peft": "", **about}


def _write(
    folder: Path, factors: Factors, config: AdapterConfig, scale: float, about: Mapping[str, Any]
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, (out, into) in factors.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = into.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = out.contiguous()
    rank = len(next(iter(tensors.values())))
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        **about,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": config.dropout,
        "target_modules": [*factors],
        "bias": "none",
        "fan_in_fan_out": False,
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n")


def _why_not(state: AdapterState) -> str:
    layers, starts = state.meta["layers"], set(state.meta["starts"])
    if "configs" in state.meta:
        return "its layers have several configs"
    if starts and starts != set(layers):
        return "some of its layers have a start and some have none"
    keys = (*FACTORS, *START)
    more = sorted(set(state.tensors) - {f"{name}.{key}" for name in layers for key in keys})
    return f"{more[0]} is trained beside it" if more else ""


def _update(state: AdapterState, config: AdapterConfig, name: str) -> Update:
    """A layer's dW."""
    k, d, *norm = state.meta["layers"][name]
    bound = bound_of(config, lambda: norm[0] / math.sqrt(k * d))
    a, b, a0, b0 = (state.tensors.get(f"{name}.{key}") for key in (*FACTORS, *START))
    assert a is not None and b is not None, "every layer has its factors"
    return Update(a, b, bound, None if a0 is None or b0 is None else (a0, b0))


def _nearest(updates: Mapping[str, Update], own: int) -> tuple[Factors, float]:
    """(k, R) and (R, d) of each layer with their relative error, of one rank R for all."""
    sizes = [(len(update.A), update.Bt.shape[1]) for update in updates.values()]
    smaller = (k * d // (k + d) for k, d in sizes)  # than the dense matrix
    widest = max(1, min(WIDEST * own, *smaller))
    parts: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    total, kept = 0.0, torch.zeros(widest, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for name, update in updates.items():
            delta = whole_delta(update)
            total += float(delta.double().square().sum())
            parts[name] = torch.svd_lowrank(delta, q=widest, niter=4)
            kept += parts[name][1].double().square().cumsum(0)
    errors = ((total - kept).clamp_min(0) / total).sqrt() if total else torch.zeros(widest)
    near = (errors <= TOLERANCE).nonzero()
    rank = int(near[0]) + 1 if len(near) else widest
    roots = {name: values[:rank].sqrt() for name, (_, values, _) in parts.items()}
    factors = {
        name: (left[:, :rank] * roots[name], (right[:, :rank] * roots[name]).T)
        for name, (left, _, right) in parts.items()
    }
    # the difference of two sums of squares ends at the rounding of float32
    missed = sum(
        float((whole_delta(updates[name]) - out @ into).double().square().sum())
        for name, (out, into) in factors.items()
    )
    return factors, math.sqrt(missed / total) if total else 0.0
