"""The kernel under :class:`common.adapters.BoundedLinear`: bounds and the merged product.

Every bound is written as one formula, ``dW = outer * phi(inner * A Bt)`` with Bt = B^T stored as
r x d, so that the absolute and the layer-relative bound differ in two numbers only:

=========  ====================  =================================
bound      outer                 inner
=========  ====================  =================================
absolute   alpha / r             omega
relative   c * rms(W0)           (alpha / r) * omega / (c * rms(W0))
=========  ====================  =================================

:func:`bounded_linear` is the seam for a faster kernel: whatever replaces it must keep its values.

Source: the paper's eq. "bounded low rank approach"; LoRA is arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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

BOUNDED = frozenset({"sine", "tanh", "sigmoid", "clip"})
"""Names of the phi that have a bound."""


def apply_phi(name: str, z: Tensor, clip: float = 1.5) -> Tensor:
    """phi(z), entrywise; any shape.  ``sigmoid`` is centred: sigmoid(z) - 1/2."""
    return _PHI[name](z, clip)


def phi_bound(name: str, clip: float = 1.5) -> float:
    """sup |phi|: infinite for relu and identity."""
    return {"sine": 1.0, "tanh": 1.0, "sigmoid": 0.5, "clip": clip}.get(name, float("inf"))


def bounded_delta(
    A: Tensor, Bt: Tensor, *, phi: str, outer: float, inner: float, clip: float = 1.5
) -> Tensor:
    """dW = outer * phi(inner * A Bt), shape (k, d), from A (k, r) and Bt (r, d).

    Computed in the factors' own precision even under autocast: arguments of many radians do not
    survive bfloat16, and the merged layer must be the one that was trained.
    """
    with torch.autocast(A.device.type, enabled=False):
        return outer * apply_phi(phi, inner * (A @ Bt), clip)


def bounded_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    A: Tensor,
    Bt: Tensor,
    *,
    phi: str,
    outer: float,
    inner: float,
    clip: float = 1.5,
    offset: Tensor | None = None,
) -> Tensor:
    """``x (W0 + dW)^T + b`` with one product on the merged weight.

    Args:
        x: (..., d).
        weight: Frozen W0, (k, d); the product is taken in its dtype.
        bias: Frozen (k,) or None.
        A: (k, r).
        Bt: (r, d).
        phi: Name of the bound; ``identity`` takes the low-rank path (two skinny products).
        outer: Factor outside phi.
        inner: Factor inside phi.
        clip: Threshold of phi = clip.
        offset: dW at the start, subtracted (phi = relu only), (k, d).

    Returns:
        (..., k).
    """
    if phi == "identity":
        A, Bt = A.to(weight.dtype), Bt.to(weight.dtype)
        return F.linear(x, weight, bias) + F.linear(F.linear(x, Bt), A) * (outer * inner)
    delta = bounded_delta(A, Bt, phi=phi, outer=outer, inner=inner, clip=clip)
    if offset is not None:
        delta = delta - offset
    return F.linear(x, (weight + delta).to(weight.dtype), bias)


def gram_norm(A: Tensor, Bt: Tensor) -> Tensor:
    """||A B^T||_F from r x r Gram matrices, never forming k x d.

    tr((A^T A)(B^T B)) = ||A B^T||_F^2.  In float64, as squaring halves the digits: where columns of
    A and B cancel in the product, float32 would report a norm that is far too small (a device that
    has no float64 gets float32).
    """
    dtype = torch.float32 if A.device.type == "mps" else torch.float64
    A, Bt = A.to(dtype), Bt.to(dtype)
    squared = ((A.mT @ A) * (Bt @ Bt.mT)).sum()
    return squared.clamp_min(0).sqrt()
