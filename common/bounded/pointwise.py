"""Adapters on 1x1 convolutions: the linear map over the channels that each position gets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear


class BoundedPointwise(BoundedLinear):
    """A 1x1 convolution with a frozen weight and a (bounded) low-rank update.

    It is :class:`BoundedLinear` over the channels: ``weight`` is (k, d) while an adapter is
    attached, a view of the convolution's (k, d, 1, 1).

    Args:
        base: A layer for which :func:`is_pointwise` holds; its parameters are shared and frozen.
        config: Rank, bound and scales.
        generator: Draws B, as for :class:`BoundedLinear`.
    """

    def __init__(self, base: nn.Conv2d, config: AdapterConfig, generator: torch.Generator):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(base.weight.detach().flatten(1), requires_grad=False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        k, d = self.weight.shape
        self._make_factors(k, d, self.weight.device, config, generator)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d, H, W) -> (..., k, H, W)."""
        return super().forward(x.movedim(-3, -1)).movedim(-1, -3)

    def merge(self) -> tuple[nn.Module, Tensor]:
        """As :meth:`BoundedLinear.merge`; the layer is a 1x1 convolution again."""
        linear, squares = super().merge()
        k, d = self.weight.shape
        layer = nn.Conv2d(d, k, 1, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(linear.get_parameter("weight").detach()[..., None, None])
        if self.bias is not None:
            layer.bias = linear.get_parameter("bias")
        return layer.train(self.training), squares


def is_pointwise(module: nn.Module) -> bool:
    """Whether ``module`` is a 1x1 convolution that maps each position by itself, on one grid."""
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == module.stride == (1, 1)
        and module.groups == 1
        and module.padding in ((0, 0), "same", "valid")
    )
