"""Where a plain vision transformer looks: attention over its patches, and masks made of it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.base.errors import ConfigError


def patch_attention(model: nn.Module, inputs: Tensor, block: int = -1) -> Tensor:
    """Attention that the classified token pays to each patch, averaged over heads.

    Args:
        model: A timm vision transformer: ``blocks[i].attn`` with ``fused_attn`` and ``attn_drop``.
        inputs: (N, C, S, S).
        block: Which block.

    Returns:
        (N, patches): the class token's row; without a class token (mean pooling), the mean over the
        patches' own rows, since their mean is what is classified.

    Raises:
        ConfigError: The model has no such attention (Swin, a CNN).
    """
    attention = _attention(model, block)
    maps: list[Tensor] = []
    fused, attention.fused_attn = attention.fused_attn, False
    hook = attention.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        hook.remove()
        attention.fused_attn = fused
    prefix: int = getattr(model, "num_prefix_tokens", 1)
    weights = maps[0].mean(1)[:, :, prefix:]
    has_class_token = getattr(model, "cls_token", None) is not None
    return weights[:, 0] if has_class_token else weights[:, prefix:].mean(1)


def _attention(model: nn.Module, block: int) -> Any:
    blocks = getattr(model, "blocks", None)
    try:
        attention = blocks[block].attn  # type: ignore[index]
        _ = attention.fused_attn, attention.attn_drop
    except (TypeError, IndexError, AttributeError):
        raise ConfigError(
            f"{type(model).__name__} has no blocks[{block}].attn of timm's vision transformer; "
            "choose a ViT or DeiT (or another block)"
        ) from None
    return attention


def patch_mask(chosen: Tensor, side: int) -> Tensor:
    """(N, patches) booleans, row by row, as a pixel mask (N, 1, side, side)."""
    grid = math.isqrt(chosen.shape[1])
    assert grid * grid == chosen.shape[1], f"{chosen.shape[1]} patches are no square grid"
    square = chosen.view(-1, 1, grid, grid).float()
    return F.interpolate(square, (side, side), mode="nearest").bool()
