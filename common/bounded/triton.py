"""The bounded layer on CUDA: build the merged weight, contract its gradient.

With ``Z = frequency * A Bt`` and ``W = W0 + amplitude * phi(Z)``:

* :func:`build_weight` writes W in one pass over W0: a tile of Z is made on chip, where it stays.
* :func:`contract` is the product ``G = g^T x`` whose epilogue multiplies a tile of G by
  ``amplitude * frequency * phi'(Z)`` and contracts it into ``dA = H Bt^T`` and ``dBt = A^T H``.
  G never reaches memory; W is the only k x d matrix that does.

The epilogue is linear in G, so tokens may be split over programs without another pass.  Partial
sums go to a workspace that is summed in a fixed order: the same bits in every run on one kind of
device.  Atomics, if asked for, save the workspace and lose that.

What the kernels do not take (a rank above :data:`MAX_RANK`, a phi without a compiled branch,
compute capability below 8.0, ROCm)
runs as plain products around two pointwise bodies that ``torch.compile`` fuses.  Its generator for
GPUs is Triton too: where Triton is absent, importing this module fails and the eager path stays.

**Never run on a GPU, so not timed**: tiles, warps and the split follow a cost model and what the
compiler says about registers (nothing spills at these ranks for compute capability 9.0).  The
arithmetic is tested in Triton's interpreter (``TRITON_INTERPRET=1`` before the first import), which
does not emulate the precision of tensor cores.
"""

from __future__ import annotations

import contextlib
import math
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
MOST_SPLITS = 8
EPILOGUE_TOKENS = 140
"""Cost of an epilogue in tokens of the main loop (a model: 48 of products, 92 of phi')."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of one program's tile; powers of two, at least 16.

    Attributes:
        rows: Output features (of k).
        columns: Input features (of d).
        tokens: Depth of one step of the product (of N).
        warps: Warps of a program.
        stages: Stages of the software pipeline.
    """

    rows: int
    columns: int
    tokens: int = 64
    warps: int = 8
    stages: int = 3


BUILD_TILES = Tiles(128, 128)
CONTRACT_TILES = Tiles(128, 64)
WIDE_TILES = Tiles(64, 64, 32)
"""For float32 operands, which take twice the shared memory."""


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
    splits: int | None = None,
    atomic: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A and Bt from the upstream gradient and the input of the layer.

    ``H = amplitude * frequency * (g^T x) * phi'(frequency * A Bt)``; ``dA = H Bt^T``;
    ``dBt = A^T H``, summed in float32.

    Args:
        g: dL/dy, (N, k), any strides, N >= 1.
        x: (N, d), any strides, of g's dtype.
        splits: Parts of the tokens that run beside each other; chosen for the device when absent.
        atomic: Add by atomics (no workspace, but other bits in every run).
        tiles: Sizes of one program's tile; chosen by dtype when absent.

    Returns:
        (k, r) and (r, d) in float32, or None where not wanted.
    """
    assert g.dtype == x.dtype, f"operands of the product differ: {g.dtype}, {x.dtype}"
    if not _native(update.A, update.bound):
        dA, dBt = compiled_contract(g, x, update)
    else:
        tiles = tiles or (WIDE_TILES if g.dtype == torch.float32 else CONTRACT_TILES)
        dA, dBt = _contract(g, x, update, splits, atomic, tiles)
    return dA if need_A else None, dBt if need_Bt else None


def _contract(
    g: Tensor, x: Tensor, update: Update, splits: int | None, atomic: bool, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    A, Bt, bound = update.A.contiguous(), update.Bt.contiguous(), update.bound
    (tokens, k), d, r = g.shape, x.shape[1], A.shape[1]
    rows, columns = triton.cdiv(k, tiles.rows), triton.cdiv(d, tiles.columns)
    processors = (
        torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    )
    splits = splits or choose_splits(rows * columns, tokens, processors)
    share = triton.cdiv(triton.cdiv(tokens, splits), tiles.tokens) * tiles.tokens
    make, slots = (torch.zeros, (1, 1)) if atomic else (torch.empty, (columns, rows))
    parts = 1 if atomic else splits
    dA = make(parts * slots[0], k, r, dtype=torch.float32, device=x.device)
    dBt = make(parts * slots[1], r, d, dtype=torch.float32, device=x.device)
    with _on(x):
        contract_kernel[(rows, columns, splits)](
            g,
            x,
            A,
            Bt,
            dA,
            dBt,
            tokens,
            share,
            k,
            d,
            r,
            bound.amplitude * bound.frequency,
            bound.frequency,
            bound.clip,
            *g.stride(),
            *x.stride(),
            PHI=bound.phi,
            PRECISION="tf32" if _tf32_allowed() else EXACT,
            EXACT=EXACT,
            EPILOGUE=EXACT if g.dtype == torch.float32 else "tf32",
            WIDEN=INTERPRETED,  # the interpreter has no product of bfloat16
            ATOMIC=atomic,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            TOKENS=tiles.tokens,
            RANK=_padded(r),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return dA.sum(0), dBt.sum(0)


def choose_splits(tiles: int, tokens: int, processors: int) -> int:
    """Parts of the tokens that fill the last wave of programs: the cheapest in a simple model.

    A program costs its tokens and one epilogue; ``ceil(tiles * s / processors)`` of them run one
    after the other (144 tiles on 132 processors waste almost half of the second wave).
    """

    def cost(parts: int) -> float:
        return math.ceil(tiles * parts / processors) * (tokens / parts + EPILOGUE_TOKENS)

    return min(range(1, MOST_SPLITS + 1), key=cost)


def _native(A: Tensor, bound: Bound) -> bool:
    """Whether the kernels themselves take this layer."""
    if A.shape[1] > MAX_RANK or bound.phi not in BRANCHES:
        return False
    if INTERPRETED:
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(A.device) >= (8, 0)


def _tf32_allowed() -> bool:
    """What the user said of float32 products; the older way to ask raises once the new was used."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def _padded(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
