"""A vision transformer with learnable keys that say which classes it may use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from common.base.errors import ConfigError


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
