"""What single methods need of a vision transformer: attention over its patches, and class keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stable_forgetting.common.base.errors import ConfigError


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


class KeyedViT(nn.Module):
    """A ViT whose position embedding is shifted by the keys of the classes that are shown.

    Args:
        net: A timm vision transformer with a learnt position embedding of width d.
        num_classes: C.

    Raises:
        ConfigError: The network has no position embedding to carry the keys.
    """

    def __init__(self, net: nn.Module, num_classes: int):
        super().__init__()
        embedding = getattr(net, "pos_embed", None)
        if not isinstance(embedding, nn.Parameter):
            raise ConfigError(f"novo: {type(net).__name__} has no pos_embed; choose a timm ViT")
        self.net, self.num_classes = net, num_classes
        shape = (num_classes, embedding.shape[-1])
        self.keys = nn.Parameter(torch.zeros(shape, device=embedding.device))
        self.shown: Tensor
        self.register_buffer("shown", torch.ones(num_classes, device=embedding.device))

    def draw(self, std: float, stream: torch.Generator) -> None:
        """Starts the keys from N(0, std^2)."""
        with torch.no_grad():
            self.keys.copy_(std * torch.randn(self.keys.shape, generator=stream))

    def show(self, classes: Tensor) -> None:
        """Shows the keys where ``classes`` (C,) is true, in all later forwards."""
        self.shown.copy_(classes)

    def _embedding(self) -> Tensor:
        embedding: Tensor = self.net.pos_embed  # type: ignore[assignment]
        return embedding + self.shown @ self.keys / self.num_classes**0.5

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, S, S) -> logits under the keys that are shown."""
        return functional_call(self.net, {"pos_embed": self._embedding()}, (x,))

    def folded(self, deleted: Sequence[int]) -> dict[str, Tensor]:
        """State dict of the plain network after the keys of ``deleted`` classes are gone."""
        shown = torch.ones(self.num_classes)
        shown[list(deleted)] = 0
        self.show(shown)
        return {**self.net.state_dict(), "pos_embed": self._embedding().detach()}
