"""The product of a bounded layer: one autograd function that keeps nothing dense.

Every bound is written as one formula, ``dW = amplitude * phi(frequency * A Bt)`` with Bt = B^T
stored as r x d, so that the absolute and the layer-relative bound differ in two numbers only:

=========  ====================  =================================
bound      amplitude             frequency
=========  ====================  =================================
absolute   alpha / r             omega
relative   c * rms(W0)           (alpha / r) * omega / (c * rms(W0))
=========  ====================  =================================

Saved for backward are the input, the factors, and references to the frozen weight: phi and its
slope are made again, block by block, when the gradient comes.  Three k x d products per token
(forward, input, weight) is the floor of an exact bounded layer, against LoRA's two.  No double
backward, no vmap, no forward mode.

Source: the paper's eq. "bounded low rank approach"; LoRA is arXiv 2106.09685.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stable_forgetting.common.bounded import eager
from stable_forgetting.common.bounded.eager import Start, Update, factor_dtype
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.polynomial import OddPolynomial, polynomial_product


@cache
def _triton() -> ModuleType | None:
    try:
        return import_module("stable_forgetting.common.bounded.triton")
    except ImportError:
        return None


def _kernels(A: Tensor, dtype: torch.dtype) -> ModuleType:
    """Triton's kernels where the factors are on a GPU (or its interpreter is on), else eager."""
    if A.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        kernels = _triton()
        if kernels is not None and dtype in kernels.DTYPES and kernels.available(A):
            return kernels
    return eager


def gemm_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The precision in which ``nn.Linear`` would multiply here: autocast's, else the weight's.

    Without a weight, x's stands for it.
    """
    kind = x.device.type
    weight = x if weight is None else weight
    if torch.is_autocast_enabled(kind) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


@torch.no_grad()
def build_weight(weight: Tensor | None, update: Update, dtype: torch.dtype) -> Tensor:
    """W0 + dW, or dW alone where ``weight`` is None: (k, d) in ``dtype``, without a graph.

    See :func:`common.bounded.eager.build_weight`.
    """
    with torch.autocast(update.A.device.type, enabled=False):
        return cast(Tensor, _kernels(update.A, dtype).build_weight(weight, update, dtype))


_UPDATE = (  # what both operators take
    "Tensor x, Tensor? weight, Tensor A, Tensor Bt, Tensor? A0, Tensor? Bt0, Tensor? built, "
    "str phi, float amplitude, float frequency, float clip"
)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    A: Tensor,
    Bt: Tensor,
    A0: Tensor | None,
    Bt0: Tensor | None,
    built: Tensor | None,
    phi: str,
    amplitude: float,
    frequency: float,
    clip: float,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``x (W0 + dW)^T + b`` in ``dtype``, (..., d) -> (..., k)."""
    update = _update(A, Bt, A0, Bt0, Bound(phi, amplitude, frequency, clip))
    kernels = _kernels(A, dtype)
    bias = None if bias is None else bias.to(dtype)
    if built is None and _few(x) and kernels is eager and x.dtype == dtype:
        y = eager.chunked_linear(x.reshape(-1, x.shape[-1]), weight, bias, update)
        return y.view(*x.shape[:-1], len(A))
    if built is None:
        built = kernels.build_weight(weight, update, dtype)
    return F.linear(x, built, bias)


def _backward(
    x: Tensor,
    weight: Tensor | None,
    A: Tensor,
    Bt: Tensor,
    A0: Tensor | None,
    Bt0: Tensor | None,
    built: Tensor | None,
    phi: str,
    amplitude: float,
    frequency: float,
    clip: float,
    grad: Tensor,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients of x, W0, A, Bt and the bias, those that ``needs`` asks for."""
    update = _update(A, Bt, A0, Bt0, Bound(phi, amplitude, frequency, clip))
    with torch.autocast(grad.device.type, enabled=False):
        found = _gradients(grad, x, weight, update, built, needs)
    return [gradient for gradient in found if gradient is not None]


# what torch.compile keeps whole; outside a graph the functions are called as they are
_forward_operator = torch.library.custom_op(
    "stable_forgetting::bounded_linear",
    _forward,
    mutates_args=(),
    schema=f"({_UPDATE}, Tensor? bias, ScalarType dtype) -> Tensor",
)
_backward_operator = torch.library.custom_op(
    "stable_forgetting::bounded_linear_backward",
    _backward,
    mutates_args=(),
    schema=f"({_UPDATE}, Tensor grad, bool[] needs) -> Tensor[]",
)


@_forward_operator.register_fake
def _(x: Tensor, weight: Any, A: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], A.shape[0], dtype=rest[-1])


@_backward_operator.register_fake
def _(x: Tensor, weight: Tensor | None, A: Tensor, Bt: Tensor, *rest: Any) -> list[Tensor]:
    grad, needs = rest[-2:]
    made = (grad.new_empty(x.shape), weight, A, Bt, grad.new_empty(grad.shape[-1:]))
    needed = zip(made, needs, strict=True)
    return [t.new_empty(t.shape) for t, need in needed if need and t is not None]


class BoundedLinearFunction(torch.autograd.Function):
    """``x (W0 + dW)^T + b``; call it through :func:`common.bounded.product.bounded_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        A: Tensor,
        Bt: Tensor,
        A0: Tensor | None,
        Bt0: Tensor | None,
        built: Tensor | None,
        bound: Bound,
        dtype: torch.dtype,
    ) -> Tensor:
        """(..., d) -> (..., k), in ``dtype``; arguments as of :func:`bounded_linear`."""
        ctx.save_for_backward(x, weight, A, Bt, built)
        ctx.start = A0, Bt0  # constants: DDP rewrites buffers with equal values between forwards
        ctx.bound = bound
        run: Any = _forward_operator if torch.compiler.is_compiling() else _forward
        product: Tensor = run(x, weight, A, Bt, A0, Bt0, built, *bound, bias, dtype)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, W0, bias, A and Bt, each only where it is needed."""
        x, weight, A, Bt, built = ctx.saved_tensors
        need_x, need_weight, need_bias, need_A, need_Bt = ctx.needs_input_grad[:5]
        needs = [need_x, need_weight, need_A, need_Bt, need_bias]
        run: Any = _backward_operator if torch.compiler.is_compiling() else _backward
        found = run(x, weight, A, Bt, *ctx.start, built, *ctx.bound, grad, needs)
        rest = iter(found)
        dx, dW, dA, dBt, db = (next(rest) if need else None for need in needs)
        return dx, dW, db, dA, dBt, None, None, None, None, None


def _update(A: Tensor, Bt: Tensor, A0: Tensor | None, Bt0: Tensor | None, bound: Bound) -> Update:
    return Update(A, Bt, bound, None if A0 is None or Bt0 is None else (A0, Bt0))


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    update: Update,
    built: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """(dx, dW0, dA, dBt, db)."""
    A, Bt = update.A, update.Bt
    need_x, need_weight, need_A, need_Bt, need_bias = needs
    g = grad.reshape(-1, grad.shape[-1]).contiguous()
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    db = g.sum(0) if need_bias else None
    dW = (g.T @ flat).to(weight.dtype) if need_weight and weight is not None else None
    kernels = eager if len(g) == 0 else _kernels(A, g.dtype)
    wanted = {"need_A": need_A, "need_Bt": need_Bt}
    dx = dA = dBt = None
    if need_x and built is None and kernels is eager and _sweeps(g, weight, A, flat):
        dx, dA, dBt = eager.backward(g, flat, weight, update, **wanted)
    else:
        room: dict[str, Any] = {}
        if need_x:
            if built is None:
                built = build_weight(weight, update, g.dtype)
                room = {"room": built} if kernels is not eager else {}  # used for the last time
            dx = g @ built
        del built
        if need_A or need_Bt:
            dA, dBt = kernels.contract(g, flat, update, **wanted, **room)
    dx = None if dx is None else dx.view(x.shape)
    dA = dA.to(A.dtype) if need_A and dA is not None else None
    dBt = dBt.to(Bt.dtype) if need_Bt and dBt is not None else None
    return dx, dW, dA, dBt, db


def _few(x: Tensor) -> bool:
    """Fewer tokens than d / 2: a k x d buffer would be larger than LoRA's temporaries."""
    return 2 * x.numel() < x.shape[-1] ** 2


def _sweeps(g: Tensor, weight: Tensor | None, A: Tensor, x: Tensor) -> bool:
    """Whether dx is summed block by block, not by one product with a weight that is built again.

    In low precision a sum takes a float32 buffer, which pays only where the tokens are few.
    """
    wide = eager.factor_dtype(A)
    dtypes = [g.dtype] if weight is None else [g.dtype, weight.dtype]
    fits = all(torch.promote_types(dtype, wide) == wide for dtype in dtypes)
    return fits and (g.dtype == wide or _few(x))


def bounded_delta(A: Tensor, Bt: Tensor, bound: Bound) -> Tensor:
    """dW = amplitude * phi(frequency * A Bt), shape (k, d), from A (k, r) and Bt (r, d).

    Computed in the factors' own precision, at least float32, even under autocast: arguments of
    many radians do not survive bfloat16, and the merged layer must be the one that was trained.
    """
    with torch.autocast(A.device.type, enabled=False):
        wide = factor_dtype(A)
        return bound.amplitude * bound.value(bound.frequency * (A.to(wide) @ Bt.to(wide)))


def whole_delta(update: Update) -> Tensor:
    """The same of an update, less that of its start."""
    delta = bounded_delta(update.A, update.Bt, update.bound)
    return delta if update.start is None else delta - bounded_delta(*update.start, update.bound)


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
        y: Tensor = _low_rank(low, kind, Update(A, Bt, bound, start), fitted)
        return y if base is None else base + y
    dtype = gemm_dtype(x, weight)
    if dropout:
        x = F.dropout(x, dropout)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(dtype)
    A0, Bt0 = start or (None, None)
    frozen = (None, None) if split else (weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        y = BoundedLinearFunction.apply(x, *frozen, A, Bt, A0, Bt0, built, bound, dtype)
    return y if base is None else base + y


def _low_rank(
    x: Tensor, dtype: torch.dtype, update: Update, fitted: OddPolynomial | None
) -> Tensor:
    """``x dW^T`` by skinny products, in ``dtype`` or autocast's, where dW has a low rank."""
    if fitted is not None:
        return polynomial_product(x, dtype, update, fitted)
    A, Bt = (factor.to(dtype) for factor in update.joined())
    return F.linear(F.linear(x, Bt), A) * (update.bound.amplitude * update.bound.frequency)
