"""NB-LoRA: a low-rank update whose singular values lie below a bound, whatever its factors are.

With free factors ``G`` (d + k, r), ``X`` its first r rows and ``Y`` the others, Cayley's transform
makes a matrix ``Q`` of the same shape with orthonormal columns::

    Z = X - X^T + Y^T Y
    Q = [ (I - Z) (I + Z)^-1 ;  -2 Y (I + Z)^-1 ]

``A^T`` is its first d rows and ``B^T`` its last k, so that ``A A^T + B B^T = I``: no singular value
of ``dW = 2 s B^T A`` is above s, and every dW of rank r of which that is true can be reached.

Source: Wang, Dvijotham and Manchester 2025, arXiv 2501.19050, in our reading: the formula is as
public implementations state it.  Ours: one s for all directions, in units of the layer's own
singular values, and a start at ``dW = 0`` with A at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.quantised import is_quantised


def cayley(G: Tensor) -> Tensor:
    """Q (n, r) with orthonormal columns, from any G (n, r) of at least r rows."""
    r = G.shape[1]
    X, Y = G[:r], G[r:]
    Z = X - X.mT + Y.mT @ Y
    eye = torch.eye(r, dtype=G.dtype, device=G.device)
    inverse = torch.linalg.inv(eye + Z)
    return torch.cat([(eye - Z) @ inverse, -2 * Y @ inverse])


class NormBounded(nn.Module):
    """A layer's weight with ``dW = 2 s B^T A`` added; what is trained are the factors.

    Args:
        weight: W0 (k, d), or (k, d, 1, 1) of a 1x1 convolution.
        rank: r.
        size: s in units of the root mean square of W0's singular values.
        generator: Draws A's free factor; B's starts at zero.
    """

    def __init__(self, weight: Tensor, rank: int, size: float, generator: torch.Generator):
        super().__init__()
        k, d = weight.shape[:2]
        if rank > min(k, d):
            raise ConfigError(f"adapter.rank: {rank} is more than a layer of {k} x {d} has")
        self.bound = size * float(weight.detach().float().norm()) / math.sqrt(min(k, d))
        start = torch.randn(d, rank, generator=generator) / math.sqrt(d)
        self.A = nn.Parameter(start.to(weight.device))
        self.B = nn.Parameter(torch.zeros(k, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """W0 + dW, in W0's shape and dtype; dW is taken in the factors' precision."""
        d = len(self.A)
        with torch.autocast(weight.device.type, enabled=False):
            Q = cayley(torch.cat([self.A, self.B]))
            update = 2 * self.bound * (Q[d:] @ Q[:d].mT)
        return weight + update.view_as(weight).to(weight.dtype)


def attach_norm_bounded(
    model: nn.Module, names: Sequence[str], config: AdapterConfig, generator: torch.Generator
) -> None:
    """Adds an update to the weights of layers, in place; nothing else stays trainable.

    Raises:
        ConfigError: A layer is quantised, or smaller than the rank.
    """
    for name in names:
        layer = model.get_submodule(name)
        if is_quantised(layer):
            raise ConfigError(
                f"adapter target '{name}' is quantised, and nb_lora adds to dense weights; take "
                "another adapter"
            )
        assert isinstance(layer.weight, Tensor), "it is a linear layer"
        made = NormBounded(layer.weight, config.rank, config.alpha, generator)
        parametrize.register_parametrization(layer, "weight", made)


def merge_norm_bounded(model: nn.Module) -> nn.Module:
    """Merges every such update in place: the original architecture and state-dict keys."""
    for layer in list(model.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            added = layer.get_submodule("parametrizations.weight").children()
            if any(isinstance(each, NormBounded) for each in added):
                _give_own_class(layer)
                parametrize.remove_parametrizations(layer, "weight")
    return model


def _give_own_class(layer: nn.Module) -> None:
    """A class that no copy of the layer shares: torch takes the weight's property off it."""
    shared: Any = type(layer)
    own: Any = type(shared.__name__, shared.__bases__, dict(vars(shared)))
    layer.__class__ = own
