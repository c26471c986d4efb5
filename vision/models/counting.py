"""Parameter counts of models and adapters, on the meta device."""

from __future__ import annotations

import fnmatch

import torch
from torch import nn

from common.base.errors import ConfigError
from common.bounded.config import AdapterConfig
from vision.config import ModelConfig
from vision.models.build import construct
from vision.models.family import family_of


def count_adapters(
    config: ModelConfig,
    adapter: AdapterConfig,
    *,
    num_classes: int,
    in_chans: int = 3,
    image_size: int | None = None,
) -> tuple[int, int]:
    """Counts an adapter on a model of ``config`` without allocating or loading weights.

    Returns:
        sum of rank * (inputs + outputs) over the adapted layers, and the parameters of the model
        without adapters and with its ``num_classes``-way head.

    Raises:
        ConfigError: No layer matches.
    """
    bare = config.model_copy(update={"pretrained": False, "checkpoint": None})
    with torch.device("meta"):
        model = construct(bare, num_classes, in_chans, image_size or config.image_size)
    patterns = adapter.targets or family_of(config.name).targets.get(adapter.placement, ())
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and any(fnmatch.fnmatch(name, p) for p in patterns)
    ]
    if not layers:
        raise ConfigError(
            f"model {config.name}: no linear layer for placement {adapter.placement}; give targets"
        )
    trained = adapter.rank * sum(layer.in_features + layer.out_features for layer in layers)
    return trained, sum(parameter.numel() for parameter in model.parameters())
