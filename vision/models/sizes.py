"""Vision transformers in numbers, in closed form: timm's plain ViTs and DeiTs, and from scratch."""

from __future__ import annotations

import re

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.protocol.sizes import (
    Shape,
    Sizes,
    adapter_parameters,
    linear_parameters,
)
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models.family import family_of

NAME = re.compile(r"(?:vit|deit)_(tiny|small|base|large)_patch(\d+)_(clip_)?(\d+)(?:\..+)?")
PLAIN = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24)}
"""Size in timm's names -> (width, blocks); the MLP is four times as wide."""


def sizes_of(
    config: ModelConfig, *, num_classes: int, in_chans: int = 3, image_size: int | None = None
) -> Sizes | None:
    """Sizes of a model; None for other architectures of timm.

    Args:
        num_classes: Width of the logits.
        in_chans: Channels of the images.
        image_size: Input side in px that replaces the model's own.
    """
    side = image_size or config.image_size
    if config.name == "scratch":
        assert config.patch_size and config.dim and config.depth and config.mlp_ratio and side
        stem = _patches(in_chans, config.dim, config.patch_size)
        if config.stem == "conv":
            stem = 9 * (32 * in_chans + 64 * 32) + 3 * (32 + 64)  # biases and GroupNorms
            stem += _patches(64, config.dim, config.patch_size // 4)
        token = 0 if config.pool == "avg" else 1
        inner = int(config.dim * config.mlp_ratio)
        shape = (config.dim, config.depth, inner)
        return _sizes(shape, stem, side // config.patch_size, num_classes, token)
    match = NAME.fullmatch(config.name)
    if match is None:
        return None
    width, depth = PLAIN[match[1]]
    patch, clip = int(match[2]), match[3] is not None
    stem = _patches(in_chans, width, patch)
    if clip:  # a norm in the place of the bias
        stem += width
    grid = (side or int(match[4])) // patch
    return _sizes((width, depth, 4 * width), stem, grid, num_classes, 1)


def positions_of(config: ModelConfig, image_size: int | None = None) -> int | None:
    """Tokens that an image becomes; None for other architectures of timm."""
    side, token = image_size or config.image_size, 1
    patch = config.patch_size
    if config.name == "scratch":
        token = 0 if config.pool == "avg" else 1
    elif match := NAME.fullmatch(config.name):
        patch, side = int(match[2]), side or int(match[4])
    return (side // patch) ** 2 + token if side and patch else None


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
    sizes = sizes_of(config, num_classes=num_classes, in_chans=in_chans, image_size=image_size)
    if sizes is None:
        sizes = _built(config, num_classes, in_chans, image_size)
    patterns = adapter.targets or family_of(config.name).targets.get(adapter.placement, ())
    layers = sizes.matched(patterns)
    if not layers:
        raise ConfigError(
            f"model {config.name}: no linear layer for placement {adapter.placement}; give targets"
        )
    return adapter_parameters(layers, adapter.rank), sizes.parameters


def _built(config: ModelConfig, num_classes: int, in_chans: int, image_size: int | None) -> Sizes:
    """Counted on the architecture, without weights."""
    import torch
    from torch import nn

    from stable_forgetting.common.bounded.quantised import is_pointwise, layer_shape
    from stable_forgetting.vision.models.build import construct

    bare = config.model_copy(update={"pretrained": False, "checkpoint": None})
    with torch.device("meta"):
        model = construct(bare, num_classes, in_chans, image_size or config.image_size)
    linear = {
        name: layer_shape(layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) or is_pointwise(layer)
    }
    return Sizes(sum(p.numel() for p in model.parameters()), linear, 0, 0, num_classes)


def _patches(channels: int, width: int, side: int) -> int:
    return channels * side**2 * width + width


def _sizes(
    shape: tuple[int, int, int], stem: int, grid: int, num_classes: int, token: int
) -> Sizes:
    width, depth, inner = shape
    linear: dict[str, Shape] = {}
    for block in (f"blocks.{i}" for i in range(depth)):
        linear |= {f"{block}.attn.qkv": (3 * width, width), f"{block}.attn.proj": (width, width)}
        linear |= {f"{block}.mlp.fc1": (inner, width), f"{block}.mlp.fc2": (width, inner)}
    linear["head"] = (num_classes, width)
    rest = stem + token * width + (grid**2 + token) * width + 2 * width * (2 * depth + 1)
    count = linear_parameters(linear, bias=True) + rest
    return Sizes(count, linear, width, depth, num_classes)
