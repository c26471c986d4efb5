"""The Triton kernels as compiled programs and their launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from common.bounded.phi import Bound, apply_phi, phi_slope_

ROW_BLOCK = 2048
"""Rows that the compiled path contracts at a time."""


# Compiled bodies, for what the kernels do not take ------------------------------------------------


def _phi_body(z: Tensor, outer: float, clip: float, phi: str) -> Tensor:
    return outer * apply_phi(phi, z, clip)


def _gradient_body(G: Tensor, z: Tensor, scale: float, clip: float, phi: str) -> Tensor:
    slope = torch.empty_like(z)
    phi_slope_(phi, z.clone(), slope, clip)
    return G.to(z.dtype) * (scale * slope)


@cache
def _fused(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled at first use: the compiler's own import takes seconds."""
    return torch.compile(body, dynamic=True)


def _argument(A: Tensor, Bt: Tensor, inner: float) -> Tensor:
    return (inner * A.float()) @ Bt.float()


def _compiled_build(
    weight: Tensor | None,
    A: Tensor,
    Bt: Tensor,
    bound: Bound,
    start: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    total = _fused(_phi_body)(_argument(A, Bt, bound.inner), bound.outer, bound.clip, bound.phi)
    if start is not None:
        total -= _fused(_phi_body)(
            _argument(*start, bound.inner), bound.outer, bound.clip, bound.phi
        )
    if weight is not None:
        total += weight
    return total.to(dtype)


def _compiled_contract(
    g: Tensor, x: Tensor, A: Tensor, Bt: Tensor, bound: Bound
) -> tuple[Tensor, Tensor]:
    """By blocks of rows; a block of G is rounded to the operands' dtype."""
    dA = torch.empty(A.shape, dtype=torch.float32, device=A.device)
    dBt = torch.zeros(Bt.shape, dtype=torch.float32, device=Bt.device)
    for at in range(0, A.shape[0], ROW_BLOCK):
        block = slice(at, at + ROW_BLOCK)
        z = _argument(A[block], Bt, bound.inner)
        G = g[:, block].mT @ x
        H = _fused(_gradient_body)(G, z, bound.outer * bound.inner, bound.clip, bound.phi)
        dA[block] = (Bt.float() @ H.mT).mT
        dBt.addmm_(A[block].float().mT, H)
    return dA, dBt
