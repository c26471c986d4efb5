"""The Triton kernels behind :mod:`common.bounded.triton`.  Importing this module needs Triton.

All arithmetic is in float32; what is loaded in another dtype is widened.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import JITFunction

# Activations --------------------------------------------------------------------------------------

BRANCHES = frozenset({"sine", "tanh", "sigmoid", "relu", "clip"})
"""Names of the phi that have a branch below."""


@triton.jit
def _tanh(z):
    # 1 - 2/(e^2z + 1) cancels near zero; the series' next term is 6e-9 of tanh at 0.35
    s = z * z
    series = 0.021869488536155203 - s * 0.008863235529902197
    series = 0.13333333333333333 + s * (-0.05396825396825397 + s * series)
    series = z * (1.0 + s * (-0.3333333333333333 + s * series))
    t = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - t) / (1.0 + t)
    return tl.where(s < 0.1225, series, tl.where(z < 0, -far, far))


@triton.jit
def _phi(z, clip, PHI: tl.constexpr):
    if PHI == "sine":
        out = tl.sin(z)
    elif PHI == "tanh":
        out = _tanh(z)
    elif PHI == "sigmoid":
        out = 0.5 * _tanh(0.5 * z)
    elif PHI == "relu":
        out = tl.where(z > 0, z, 0.0)
    else:
        tl.static_assert(PHI == "clip")
        out = tl.where(z > clip, clip, tl.where(z < -clip, -clip, z))
    return out


@triton.jit
def _derivative(z, clip, PHI: tl.constexpr):
    if PHI == "sine":
        out = tl.cos(z)
    elif PHI == "tanh":
        t = _tanh(z)
        out = 1.0 - t * t
    elif PHI == "sigmoid":
        t = _tanh(0.5 * z)
        out = 0.25 * (1.0 - t * t)
    elif PHI == "relu":
        out = tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(PHI == "clip")
        out = tl.where((z >= -clip) & (z <= clip), 1.0, 0.0)
    return out


# Kernels ------------------------------------------------------------------------------------------


@triton.jit
def _factors(A, Bt, rows, columns, k, d, r, RANK: tl.constexpr):
    """Tiles of A (rows x RANK) and Bt (RANK x columns) in float32, zero beyond r."""
    ranks = tl.arange(0, RANK)
    a_mask = (rows < k)[:, None] & (ranks < r)[None, :]
    a = tl.load(A + rows[:, None] * r + ranks[None, :], mask=a_mask, other=0.0)
    b_mask = (ranks < r)[:, None] & (columns < d)[None, :]
    b = tl.load(Bt + ranks[:, None] * d + columns[None, :], mask=b_mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def build_kernel(
    weight,
    A,
    Bt,
    A0,
    Bt0,
    out,
    k,
    d,
    r,
    amplitude,
    frequency,
    clip,
    row_stride,
    column_stride,
    PHI: tl.constexpr,
    EXACT: tl.constexpr,
    WEIGHT: tl.constexpr,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    """One tile of ``W0 + amplitude * (phi(frequency * A Bt) - phi(frequency * A0 Bt0))``."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    a, b = _factors(A, Bt, rows, columns, k, d, r, RANK)
    total = amplitude * _phi(frequency * tl.dot(a, b, input_precision=EXACT), clip, PHI)
    if START:
        a, b = _factors(A0, Bt0, rows, columns, k, d, r, RANK)
        total -= amplitude * _phi(frequency * tl.dot(a, b, input_precision=EXACT), clip, PHI)
    mask = (rows < k)[:, None] & (columns < d)[None, :]
    if WEIGHT:
        given = rows.to(tl.int64)[:, None] * row_stride
        given += columns.to(tl.int64)[None, :] * column_stride
        total += tl.load(weight + given, mask=mask, other=0.0).to(tl.float32)
    at = rows.to(tl.int64)[:, None] * d + columns[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def contract_kernel(
    G,
    A,
    Bt,
    dA,
    dBt,
    k,
    d,
    r,
    tiles,
    scale,
    frequency,
    clip,
    PHI: tl.constexpr,
    EXACT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    """``H = scale * G * phi'(frequency * A Bt)`` over a strip of tiles, contracted with A and Bt.

    The strip's part of ``H Bt^T`` goes to its slot of dA, and every tile's ``A^T H`` to the slot of
    its rows in dBt.
    """
    ranks = tl.arange(0, RANK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    A_mask = (rows < k)[:, None] & (ranks < r)[None, :]
    A_at = rows[:, None] * r + ranks[None, :]
    a = tl.load(A + A_at, mask=A_mask, other=0.0).to(tl.float32)
    row_at = rows.to(tl.int64)[:, None] * d
    Bt_slot = tl.program_id(0).to(tl.int64) * r * d
    to_A = tl.zeros((ROWS, RANK), tl.float32)
    for place in range(0, tiles):
        columns = (tl.program_id(1) * tiles + place) * COLUMNS + tl.arange(0, COLUMNS)
        Bt_mask = (ranks < r)[:, None] & (columns < d)[None, :]
        Bt_at = ranks[:, None] * d + columns[None, :]
        b = tl.load(Bt + Bt_at, mask=Bt_mask, other=0.0).to(tl.float32)
        mask = (rows < k)[:, None] & (columns < d)[None, :]
        H = tl.load(G + row_at + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        z = frequency * tl.dot(a, b, input_precision=EXACT)
        H = H * scale * _derivative(z, clip, PHI)
        to_A += tl.dot(H, tl.trans(b), input_precision=EPILOGUE)
        to_Bt = tl.dot(tl.trans(a), H, input_precision=EPILOGUE)
        tl.store(dBt + Bt_slot + Bt_at, to_Bt, mask=Bt_mask)
    tl.store(dA + tl.program_id(1).to(tl.int64) * k * r + A_at, to_A, mask=A_mask)


INTERPRETED = not isinstance(build_kernel, JITFunction)
"""Whether Triton was imported under ``TRITON_INTERPRET=1``."""
