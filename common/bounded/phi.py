"""The entrywise functions phi of the bounded layer, their slopes and bounds.

Apart from the kernels that use them, so that the eager and the Triton ones share one vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Bound(NamedTuple):
    """``dW = outer * phi(inner * A Bt)``.

    Attributes:
        phi: Name of the entrywise function.
        outer: Factor outside phi.
        inner: Factor inside phi.
        clip: Threshold of phi = clip.
    """

    phi: str
    outer: float
    inner: float
    clip: float = 1.5


def _sigmoid(z: Tensor, clip: float) -> Tensor:
    # sigmoid(z) - 1/2, written so that it does not cancel near zero
    return 0.5 * torch.tanh(0.5 * z)


_PHI: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sine": lambda z, clip: torch.sin(z),
    "tanh": lambda z, clip: torch.tanh(z),
    "sigmoid": _sigmoid,
    "relu": lambda z, clip: F.relu(z),
    "clip": lambda z, clip: z.clamp(-clip, clip),
    "identity": lambda z, clip: z,
}

_PHI_: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sine": lambda z, clip: z.sin_(),
    "tanh": lambda z, clip: z.tanh_(),
    "sigmoid": lambda z, clip: z.mul_(0.5).tanh_().mul_(0.5),
    "relu": lambda z, clip: z.relu_(),
    "clip": lambda z, clip: z.clamp_(-clip, clip),
}

_SLOPE_OF_ARGUMENT: dict[str, Callable[[Tensor, float, Tensor], Tensor]] = {
    "sine": lambda z, clip, out: torch.cos(z, out=out),
    "clip": lambda z, clip, out: torch.le(torch.abs(z, out=out), clip, out=out),
}

_SLOPE_OF_VALUE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda p, out: torch.mul(p, p, out=out).neg_().add_(1.0),
    "sigmoid": lambda p, out: torch.mul(p, p, out=out).neg_().add_(0.25),
    "relu": lambda p, out: torch.gt(p, 0.0, out=out),
}

BOUNDED = frozenset({"sine", "tanh", "sigmoid", "clip"})
"""Names of the phi that have a bound."""


def apply_phi(name: str, z: Tensor, clip: float = 1.5) -> Tensor:
    """phi(z), entrywise; any shape.  ``sigmoid`` is centred: sigmoid(z) - 1/2."""
    return _PHI[name](z, clip)


def apply_phi_(name: str, z: Tensor, clip: float = 1.5) -> Tensor:
    """phi(z) in place of ``z``, without a graph; not for ``identity``."""
    return _PHI_[name](z, clip)


def phi_and_slope_(name: str, z: Tensor, slope: Tensor, clip: float = 1.5) -> None:
    """Turns ``z`` into phi(z) and fills ``slope`` with phi'(z), both of ``z``'s shape and dtype.

    At a kink the slope is torch's own: 0 for relu at 0, 1 for clip at its threshold.
    """
    if name in _SLOPE_OF_ARGUMENT:
        _SLOPE_OF_ARGUMENT[name](z, clip, slope)
        apply_phi_(name, z, clip)
    else:
        _SLOPE_OF_VALUE[name](apply_phi_(name, z, clip), slope)


def phi_slope_(name: str, z: Tensor, slope: Tensor, clip: float = 1.5) -> None:
    """Fills ``slope`` with phi'(z); ``z`` is scratch afterwards."""
    if name in _SLOPE_OF_ARGUMENT:
        _SLOPE_OF_ARGUMENT[name](z, clip, slope)
    else:
        phi_and_slope_(name, z, slope, clip)


def phi_bound(name: str, clip: float = 1.5) -> float:
    """sup |phi|: infinite for relu and identity."""
    return {"sine": 1.0, "tanh": 1.0, "sigmoid": 0.5, "clip": clip}.get(name, float("inf"))
