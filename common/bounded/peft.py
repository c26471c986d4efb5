"""Layers of the library peft in the place of our own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.norm_bounded import merge_norm_bounded
from stable_forgetting.common.bounded.quantised import is_pointwise

ADAPTER = "unlearning"
"""What peft calls its adapter here."""


def attach_peft(
    model: nn.Module, names: Sequence[str], config: AdapterConfig, generator: torch.Generator
) -> None:
    """Puts layers of peft around linear layers, in place; nothing else stays trainable.

    Raises:
        ConfigError: peft is not installed, or its DeLoRA is asked for on a 1x1 convolution.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(
            f"adapter.peft: {config.peft} needs peft: pip install 'stable-forgetting[peft]'"
        ) from None
    assert config.peft is not None, "the config asks for it"
    targets: dict[str, Any] = {"r": config.rank, "target_modules": [*names]}
    if config.peft == "oft":
        inject(model, peft.OFTConfig(**targets, oft_block_size=0), generator)
    elif config.peft == "delora":
        pointwise = [name for name in names if is_pointwise(model.get_submodule(name))]
        if pointwise:
            raise ConfigError(
                f"adapter target '{pointwise[0]}' is a 1x1 convolution, which peft's DeLoRA does "
                "not take; choose patterns that match nn.Linear layers only"
            )
        made = peft.DeloraConfig(**targets)
        made.delora_lambda = config.alpha  # type: ignore[assignment]  # peft says int, fills floats
        inject(model, made, generator)
    else:
        dora = config.peft == "dora"
        alpha: Any = config.alpha  # peft says int, and takes floats
        inject(model, peft.LoraConfig(**targets, lora_alpha=alpha, use_dora=dora), generator)


def inject(model: nn.Module, config: Any, generator: torch.Generator) -> None:
    """Attaches an adapter of peft, in place; the global random state stays as it is."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator.initial_seed())
        inject_adapter_in_model(config, model, ADAPTER)


def merge_peft(model: nn.Module) -> nn.Module:
    """Merges every adapter but our own in place: the original architecture and state-dict keys."""
    merge_norm_bounded(model)
    if "peft" not in sys.modules:
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer) and isinstance(layer, nn.Module):
            layer.merge(adapter_names=[ADAPTER])
            model.set_submodule(name, layer.get_base_layer())
    return model
