"""What the Triton kernels do not take: plain products around two compiled pointwise bodies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from stable_forgetting.common.bounded.eager import Update
from stable_forgetting.common.bounded.phi import PHIS

ROW_BLOCK = 2048
"""Rows that the compiled path contracts at a time."""


def _phi_body(z: Tensor, outer: float, phi: str, *arguments: float) -> Tensor:
    return outer * PHIS[phi].value(z, *arguments)


def _gradient_body(G: Tensor, z: Tensor, scale: float, phi: str, *arguments: float) -> Tensor:
    record, slope = PHIS[phi], torch.empty_like(z)
    if record.slope_of_argument is not None:
        record.slope_of_argument(z, slope, *arguments)
    else:
        assert record.slope_of_value is not None, "a linear phi has no weight-sized slope"
        record.slope_of_value(record.value(z, *arguments), slope, *arguments)
    return G.to(z.dtype) * (scale * slope)


@cache
def _fused(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled at first use: the compiler's own import takes seconds.

    It learns here that kernels are to be deterministic, which
    :func:`common.base.seeding.make_deterministic` has told torch alone.
    """
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)
    return torch.compile(body, dynamic=True)


def _argument(A: Tensor, Bt: Tensor, inner: float) -> Tensor:
    return (inner * A.float()) @ Bt.float()


def compiled_build(weight: Tensor | None, update: Update, dtype: torch.dtype) -> Tensor:
    """W0 + dW; as :func:`common.bounded.eager.build_weight`."""
    A, Bt, bound, start = update
    form = (bound.outer, bound.phi, *bound.arguments)
    total = _fused(_phi_body)(_argument(A, Bt, bound.inner), *form)
    if start is not None:
        total -= _fused(_phi_body)(_argument(*start, bound.inner), *form)
    if weight is not None:
        total += weight
    return total.to(dtype)


def compiled_contract(g: Tensor, x: Tensor, update: Update) -> tuple[Tensor, Tensor]:
    """dA (k, r) and dBt (r, d) by blocks of rows, each G in the operands' dtype."""
    A, Bt, bound, _ = update
    dA = torch.empty(A.shape, dtype=torch.float32, device=A.device)
    dBt = torch.zeros(Bt.shape, dtype=torch.float32, device=Bt.device)
    scale = bound.outer * bound.inner
    for at in range(0, A.shape[0], ROW_BLOCK):
        block = slice(at, at + ROW_BLOCK)
        z = _argument(A[block], Bt, bound.inner)
        G = g[:, block].mT @ x
        H = _fused(_gradient_body)(G, z, scale, bound.phi, *bound.arguments)
        dA[block] = (Bt.float() @ H.mT).mT
        dBt.addmm_(A[block].float().mT, H)
    return dA, dBt
