"""The bounded layer on CUDA: build the merged weight, contract its gradient.

With ``Z = frequency * A Bt`` and ``W = W0 + amplitude * phi(Z)``:

* :func:`build_weight` writes W in one pass over W0: a tile of Z is made on chip, where it stays.
* :func:`contract` makes ``G = g^T x`` by cuBLAS, where W stood if W is not needed any more, and
  contracts ``H = amplitude * frequency * G * phi'(Z)`` into ``dA = H Bt^T`` and ``dBt = A^T H`` in
  one pass over G.  Z and H stay on chip.  So one k x d matrix is in memory at a time.

Partial sums go to a workspace that is summed in a fixed order: the same bits in every run on one
kind of device.

What the kernels do not take (a rank above :data:`MAX_RANK`, a phi without a compiled branch,
compute capability below 8.0, ROCm)
runs as plain products around two pointwise bodies that ``torch.compile`` fuses.  Its generator for
GPUs is Triton too: where Triton is absent, importing this module fails and the eager path stays.

The arithmetic is tested in Triton's interpreter (``TRITON_INTERPRET=1`` before the first import),
which does not emulate the precision of tensor cores, and by ``python -m tools.gpu kernels``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from stable_forgetting.common.bounded.eager import Update
from stable_forgetting.common.bounded.kernels import (
    BRANCHES,
    INTERPRETED,
    build_kernel,
    contract_kernel,
)
from stable_forgetting.common.bounded.phi import PHIS, Bound

ROW_BLOCK = 2048
"""Rows that the compiled path contracts at a time."""


def _phi_body(z: Tensor, amplitude: float, phi: str, *arguments: float) -> Tensor:
    return amplitude * PHIS[phi].value(z, *arguments)


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


def _argument(A: Tensor, Bt: Tensor, frequency: float) -> Tensor:
    return (frequency * A.float()) @ Bt.float()


def compiled_build(weight: Tensor | None, update: Update, dtype: torch.dtype) -> Tensor:
    """W0 + dW; as :func:`common.bounded.eager.build_weight`."""
    A, Bt, bound, start = update
    form = (bound.amplitude, bound.phi, *bound.arguments)
    total = _fused(_phi_body)(_argument(A, Bt, bound.frequency), *form)
    if start is not None:
        total -= _fused(_phi_body)(_argument(*start, bound.frequency), *form)
    if weight is not None:
        total += weight
    return total.to(dtype)


def compiled_contract(g: Tensor, x: Tensor, update: Update) -> tuple[Tensor, Tensor]:
    """dA (k, r) and dBt (r, d) by blocks of rows, each G in the operands' dtype."""
    A, Bt, bound, _ = update
    dA = torch.empty(A.shape, dtype=torch.float32, device=A.device)
    dBt = torch.zeros(Bt.shape, dtype=torch.float32, device=Bt.device)
    scale = bound.amplitude * bound.frequency
    for at in range(0, A.shape[0], ROW_BLOCK):
        block = slice(at, at + ROW_BLOCK)
        z = _argument(A[block], Bt, bound.frequency)
        G = g[:, block].mT @ x
        H = _fused(_gradient_body)(G, z, scale, bound.phi, *bound.arguments)
        dA[block] = (Bt.float() @ H.mT).mT
        dBt.addmm_(A[block].float().mT, H)
    return dA, dBt


MAX_RANK = 32
"""The paper's largest.  Above it a program's factors and tiles outgrow its registers."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT = "tf32x3"
"""Products that must be as good as float32 (three products of tensor cores: 21 bits or more)."""
PROGRAMS = 4
"""Programs per processor, at least, where there are tiles enough."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of a tile; powers of two, at least 16.

    Attributes:
        rows: Output features (of k).
        columns: Input features (of d).
        warps: Warps of a program.
    """

    rows: int
    columns: int
    warps: int = 8


BUILD_TILES = CONTRACT_TILES = Tiles(64, 32, 4)
"""The fastest of eleven on an H200 with bfloat16 weights of 3072 x 768 to 11008 x 4096."""


def available(tensor: Tensor) -> bool:
    """Whether this module takes layers whose product runs on ``tensor``'s device and dtype."""
    if tensor.dtype not in DTYPES:
        return False
    return tensor.device.type == "cpu" if INTERPRETED else tensor.is_cuda


def build_weight(
    weight: Tensor | None, update: Update, dtype: torch.dtype, *, tiles: Tiles = BUILD_TILES
) -> Tensor:
    """``W0 + amplitude * (phi(frequency * A Bt) - phi(frequency * A0 Bt0))``, rounded once.

    Returns:
        (k, d), contiguous.
    """
    A, Bt, bound, start = update
    if not _native(A, bound):
        return compiled_build(weight, update, dtype)
    (k, r), d = A.shape, Bt.shape[1]
    out = torch.empty(k, d, dtype=dtype, device=A.device)
    first = out if weight is None else weight
    factors = A.contiguous(), Bt.contiguous()
    started = factors if start is None else (start[0].contiguous(), start[1].contiguous())
    with _on(A):
        build_kernel[(triton.cdiv(k, tiles.rows), triton.cdiv(d, tiles.columns))](
            first,
            *factors,
            *started,
            out,
            k,
            d,
            r,
            bound.amplitude,
            bound.frequency,
            bound.clip,
            *first.stride(),
            PHI=bound.phi,
            EXACT=EXACT,
            WEIGHT=weight is not None,
            START=start is not None,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            RANK=_padded(r),
            num_warps=tiles.warps,
        )
    return out


def contract(
    g: Tensor,
    x: Tensor,
    update: Update,
    *,
    need_A: bool = True,
    need_Bt: bool = True,
    room: Tensor | None = None,
    tiles: Tiles = CONTRACT_TILES,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A and Bt from the upstream gradient and the input of the layer.

    ``H = amplitude * frequency * (g^T x) * phi'(frequency * A Bt)``; ``dA = H Bt^T``;
    ``dBt = A^T H``, summed in float32.  ``g^T x`` is rounded to g's dtype, as the gradient of the
    weight of ``nn.Linear`` is.

    Args:
        g: dL/dy, (N, k), any strides, N >= 1.
        x: (N, d), any strides, of g's dtype.
        room: (k, d) of g's dtype, contiguous, that may be written over.

    Returns:
        (k, r) and (r, d) in float32, or None where not wanted.
    """
    assert g.dtype == x.dtype, f"operands of the product differ: {g.dtype}, {x.dtype}"
    if not _native(update.A, update.bound):
        dA, dBt = compiled_contract(g, x, update)
    else:
        dA, dBt = _contract(torch.mm(g.mT, x, out=room), update, tiles)
    return dA if need_A else None, dBt if need_Bt else None


def _contract(G: Tensor, update: Update, tiles: Tiles) -> tuple[Tensor, Tensor]:
    A, Bt, bound = update.A.contiguous(), update.Bt.contiguous(), update.bound
    (k, r), d = A.shape, Bt.shape[1]
    rows, columns = triton.cdiv(k, tiles.rows), triton.cdiv(d, tiles.columns)
    length = max(1, rows * columns // (PROGRAMS * _processors(A.device)))
    strips = triton.cdiv(columns, length)
    dA = torch.empty(strips, k, r, dtype=torch.float32, device=A.device)
    dBt = torch.empty(rows, r, d, dtype=torch.float32, device=A.device)
    with _on(A):
        contract_kernel[(rows, strips)](
            G,
            A,
            Bt,
            dA,
            dBt,
            k,
            d,
            r,
            length,
            bound.amplitude * bound.frequency,
            bound.frequency,
            bound.clip,
            PHI=bound.phi,
            EXACT=EXACT,
            EPILOGUE=EXACT if G.dtype == torch.float32 else "tf32",
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            RANK=_padded(r),
            num_warps=tiles.warps,
        )
    return dA.sum(0), dBt.sum(0)


@cache
def _processors(device: torch.device) -> int:
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1


def _native(A: Tensor, bound: Bound) -> bool:
    """Whether the kernels themselves take this layer."""
    if A.shape[1] > MAX_RANK or bound.phi not in BRANCHES:
        return False
    if INTERPRETED:
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(A.device) >= (8, 0)


def _padded(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
