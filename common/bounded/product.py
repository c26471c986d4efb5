"""The kernel under :class:`common.bounded.layer.BoundedLinear`: bounds and the merged product.

Every bound is written as one formula, ``dW = outer * phi(inner * A Bt)`` with Bt = B^T stored as
r x d, so that the absolute and the layer-relative bound differ in two numbers only:

=========  ====================  =================================
bound      outer                 inner
=========  ====================  =================================
absolute   alpha / r             omega
relative   c * rms(W0)           (alpha / r) * omega / (c * rms(W0))
=========  ====================  =================================

:func:`bounded_linear` is the seam: what is behind it (:mod:`common.bounded.function`) keeps the
values of the formula.

Source: the paper's eq. "bounded low rank approach"; LoRA is arXiv 2106.09685.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_forgetting.common.bounded.eager import Start, factor_dtype
from stable_forgetting.common.bounded.function import BoundedLinearFunction, gemm_dtype
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.polynomial import OddPolynomial, polynomial_product


def bounded_delta(A: Tensor, Bt: Tensor, bound: Bound) -> Tensor:
    """dW = outer * phi(inner * A Bt), shape (k, d), from A (k, r) and Bt (r, d).

    Computed in the factors' own precision, at least float32, even under autocast: arguments of
    many radians do not survive bfloat16, and the merged layer must be the one that was trained.
    """
    with torch.autocast(A.device.type, enabled=False):
        wide = factor_dtype(A)
        return bound.outer * bound.value(bound.inner * (A.to(wide) @ Bt.to(wide)))


def bounded_linear(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    A: Tensor,
    Bt: Tensor,
    bound: Bound,
    *,
    start: Start | None = None,
    split: bool = False,
    dropout: float = 0.0,
    grad_gemm_dtype: torch.dtype | None = None,
    built: Tensor | None = None,
    fitted: OddPolynomial | None = None,
) -> Tensor:
    """``x (W0 + dW)^T + b`` with one product on the merged weight.

    Args:
        x: (..., d).
        weight: Frozen W0, (k, d); the product is taken in its dtype, or in autocast's.  None, with
            ``split``: ``x dW^T`` alone, in x's dtype or autocast's.
        bias: Frozen (k,) or None.
        A: (k, r).
        Bt: (r, d).
        bound: The form of dW; a linear phi takes the low-rank path (two skinny products).
        start: (A0, Bt0), whose dW is subtracted.
        split: ``x W0^T + b + x dW^T`` instead, five products for three: low precision does not
            round dW against W0.
        dropout: Of the input as dW sees it, from torch's global stream; needs ``split`` or a
            linear phi.
        grad_gemm_dtype: Precision of the weight-sized gradient product alone, if lower.
        built: W0 + dW (dW alone if ``split``) in the product's dtype, if it exists already.
        fitted: What stands for phi, if dW is to be a low-rank product of monomials.

    Returns:
        (..., k).
    """
    low_rank = bound.record.linear or fitted is not None
    assert not dropout or split or low_rank, "a merged product has no input of its own"
    assert split or weight is not None, "dW stands alone in split mode only"
    base = None
    if weight is not None and (split or low_rank):
        base = F.linear(x, weight, bias)
    if low_rank:
        low = F.dropout(x, dropout) if dropout else x
        kind = x.dtype if weight is None else weight.dtype
        y: Tensor = _low_rank(low, kind, A, Bt, bound, start, fitted)
        return y if base is None else base + y
    dtype = gemm_dtype(x, weight)
    if dropout:
        x = F.dropout(x, dropout)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(dtype)
    A0, Bt0 = start or (None, None)
    frozen = (None, None) if split else (weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        y = BoundedLinearFunction.apply(
            x, *frozen, A, Bt, A0, Bt0, built, bound, dtype, grad_gemm_dtype
        )
    return y if base is None else base + y


def _low_rank(
    x: Tensor,
    dtype: torch.dtype,
    A: Tensor,
    Bt: Tensor,
    bound: Bound,
    start: Start | None,
    fitted: OddPolynomial | None,
) -> Tensor:
    """``x dW^T`` by skinny products, in ``dtype`` or autocast's, where dW has a low rank."""
    if fitted is not None:
        return polynomial_product(x, dtype, A, Bt, bound, fitted, start)
    if start is not None:
        A, Bt = torch.cat([A, -start[0]], dim=1), torch.cat([Bt, start[1]])
    A, Bt = A.to(dtype), Bt.to(dtype)
    return F.linear(F.linear(x, Bt), A) * (bound.outer * bound.inner)


def gram_norm(A: Tensor, Bt: Tensor) -> Tensor:
    """||A B^T||_F, (...), of A (..., k, r) and Bt (..., r, d), never forming k x d.

    tr((A^T A)(B^T B)) = ||A B^T||_F^2.  In float64, as squaring halves the digits: where columns of
    A and B cancel in the product, float32 would report a norm that is far too small (a device that
    has no float64 gets float32).
    """
    dtype = torch.float32 if A.device.type == "mps" else torch.float64
    A, Bt = A.to(dtype), Bt.to(dtype)
    squared = ((A.mT @ A) * (Bt @ Bt.mT)).sum((-2, -1))
    return squared.clamp_min(0).sqrt()
