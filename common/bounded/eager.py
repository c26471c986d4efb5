"""The bounded layer's operations in plain torch: the path of CPUs, and where Triton is absent.

Everything dense is made by blocks of output rows that stay in cache; only the effective weight is
ever k x d, and not even that where the tokens are few.  :mod:`common.bounded.triton` offers
:func:`build_weight` and :func:`contract` with the same signatures.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stable_forgetting.common.bounded.phi import Bound

Start = tuple[Tensor, Tensor]


class Update(NamedTuple):
    """A low-rank update: ``dW = amplitude (phi(frequency A Bt) - phi(frequency A0 Bt0))``.

    Attributes:
        A: (k, r).
        Bt: (r, d).
        bound: phi and its scales.
        start: (A0, Bt0), whose dW is subtracted, or None.
    """

    A: Tensor
    Bt: Tensor
    bound: Bound
    start: Start | None = None

    def joined(self) -> tuple[Tensor, Tensor]:
        """(k, R) and (R, d), whose product is ``A Bt - A0 Bt0``."""
        if self.start is None:
            return self.A, self.Bt
        return torch.cat([self.A, -self.start[0]], dim=1), torch.cat([self.Bt, self.start[1]])


BLOCK_BYTES = 4 * 2**20
"""Scratch per block; 2-8 MiB are equally fast, far below that the products starve."""
MIN_ROWS = 256
"""Rows per block at least, where there are tokens enough."""
FEW_ROWS = 64
"""Rows per block at least, however few the tokens."""


def row_blocks(k: int, d: int, itemsize: int, tokens: int | None = None) -> list[slice]:
    """Slices of output rows, of nearly equal size: at most :data:`BLOCK_BYTES` of k x d each.

    Few ``tokens`` (N) take smaller blocks: two of them stay below N k or N d, the size of what a
    LoRA layer needs for the moment.
    """
    rows = max(BLOCK_BYTES // max(d * itemsize, 1), MIN_ROWS)
    if tokens is not None:
        rows = min(rows, max(tokens * max(k, d) // max(2 * d, 1), FEW_ROWS))
    count = math.ceil(k / max(min(rows, k), 1))
    rows = 16 * math.ceil(k / max(count, 1) / 16)
    return [slice(at, min(at + rows, k)) for at in range(0, k, rows)] if k else []


def factor_dtype(A: Tensor) -> torch.dtype:
    """What phi is computed in: the factors' dtype, at least float32."""
    return torch.promote_types(A.dtype, torch.float32)


def build_weight(weight: Tensor | None, update: Update, dtype: torch.dtype) -> Tensor:
    """W0 + dW, or dW alone where there is no ``weight``; rounded to ``dtype`` once, at the end.

    Args:
        weight: Frozen W0, (k, d), of any floating dtype.

    Returns:
        (k, d), contiguous, without a graph.
    """
    A, Bt, bound, start = update
    k, d = A.shape[0], Bt.shape[1]
    wide = factor_dtype(A)
    A, Bt = A.to(wide) * bound.frequency, Bt.to(wide)
    first = None if start is None else (start[0].to(wide) * bound.frequency, start[1].to(wide))
    out = torch.empty(k, d, dtype=dtype, device=A.device)
    for rows in row_blocks(k, d, wide.itemsize):
        z = torch.mm(A[rows], Bt, out=out[rows]) if dtype == wide else A[rows] @ Bt
        bound.replace_(z).mul_(bound.amplitude)
        if first is not None:
            z.sub_(bound.replace_(first[0][rows] @ first[1]), alpha=bound.amplitude)
        if weight is not None:
            fits = torch.promote_types(z.dtype, weight.dtype) == z.dtype
            z = z.add_(weight[rows]) if fits else z + weight[rows]
        if z.data_ptr() != out[rows].data_ptr():
            out[rows] = z
    return out


def chunked_linear(x: Tensor, weight: Tensor | None, bias: Tensor | None, update: Update) -> Tensor:
    """``x (W0 + dW)^T + b`` without a k x d buffer, for few tokens; (N, d) -> (N, k)."""
    A, Bt, bound, start = update
    k, d = A.shape[0], Bt.shape[1]
    y = x.new_empty(len(x), k)
    for rows in row_blocks(k, d, factor_dtype(A).itemsize, len(x)):
        first = None if start is None else (start[0][rows], start[1])
        base = None if weight is None else weight[rows]
        block = build_weight(base, Update(A[rows], Bt, bound, first), x.dtype)
        if bias is None:
            torch.mm(x, block.T, out=y[:, rows])
        else:
            torch.addmm(bias[rows], x, block.T, out=y[:, rows])
    return y


def contract(
    g: Tensor, x: Tensor, update: Update, *, need_A: bool = True, need_Bt: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the factors, H B and A^T H, with the slope's H.

    ``H = amplitude * frequency * (g^T x) * phi'(frequency * A Bt)``.

    Args:
        g: Gradient of the output, (N, k).
        x: Input, (N, d), of ``g``'s dtype: that of the product g^T x.
        update: dW; its start does not enter.

    Returns:
        dA (k, r) and dBt (r, d) in the factors' dtype, at least float32; None if not wanted.
    """
    sweep = _Sweep(g, x, update, need_A, need_Bt)
    for rows in sweep.blocks:
        z, slope = sweep.arguments(rows)
        update.bound.slope_(z, slope)
        sweep.add(rows, z, slope)
    return sweep.factors()


def backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    update: Update,
    *,
    need_A: bool,
    need_Bt: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dA, dBt) in one sweep over the rows, each argument of phi built once.

    dx is summed over the blocks in the factors' dtype, which must hold ``weight``'s and ``g``'s.
    """
    bound, start = update.bound, update.start
    dx = torch.zeros_like(x, dtype=factor_dtype(update.A))
    sweep = _Sweep(g, x, update, need_A, need_Bt)
    for rows in sweep.blocks:
        z, slope = sweep.arguments(rows)
        bound.value_and_slope_(z, slope)
        z.mul_(bound.amplitude)
        if start is not None:
            first = (start[0][rows].to(z.dtype) * bound.frequency) @ start[1].to(z.dtype)
            z.sub_(bound.replace_(first), alpha=bound.amplitude)
        if weight is not None:
            z.add_(weight[rows])
        if g.dtype == z.dtype:
            torch.addmm(dx, g[:, rows], z, out=dx)
        else:
            dx.add_(g[:, rows] @ z.to(g.dtype))
        sweep.add(rows, z, slope)
    return dx.to(g.dtype), *sweep.factors()


class _Sweep:
    """What a pass over blocks of rows accumulates, with two blocks of scratch."""

    def __init__(self, g: Tensor, x: Tensor, update: Update, need_A: bool, need_Bt: bool):
        A, Bt, bound, _ = update
        (k, r), d = A.shape, Bt.shape[1]
        wide = factor_dtype(A)
        self.g, self.x, self.A, self.Bt = g, x, A.to(wide), Bt.to(wide)
        self.scaled_A = self.A * bound.frequency
        self.scale = bound.amplitude * bound.frequency
        self.dA = self.A.new_empty(k, r) if need_A else None
        self.dBt = self.Bt.new_zeros(r, d) if need_Bt else None
        self.blocks = row_blocks(k, d, wide.itemsize, len(x))
        rows = self.blocks[0].stop if self.blocks else 0
        self._scratch = self.A.new_empty(2, rows, d)

    def arguments(self, rows: slice) -> tuple[Tensor, Tensor]:
        """``frequency * A Bt`` of a block, and room for its slopes; both scratch."""
        z, slope = self._scratch[:, : rows.stop - rows.start]
        return torch.mm(self.scaled_A[rows], self.Bt, out=z), slope

    def add(self, rows: slice, z: Tensor, slope: Tensor) -> None:
        """Contracts a block's gradient with ``slope``; ``z`` is used up."""
        if self.dA is None and self.dBt is None:
            return
        if self.g.dtype == z.dtype:
            torch.mm(self.g[:, rows].T, self.x, out=z)
        else:
            z.copy_(self.g[:, rows].T @ self.x)
        z.mul_(slope)
        # these orientations: the skinny products are up to ten times slower the other way round
        if self.dA is not None:
            self.dA[rows] = (self.Bt @ z.T).T
        if self.dBt is not None:
            torch.addmm(self.dBt, self.A[rows].T, z, out=self.dBt)

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """(dA, dBt), to be asked for once."""
        for gradient in (self.dA, self.dBt):
            if gradient is not None:
                gradient.mul_(self.scale)
        return self.dA, self.dBt


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
