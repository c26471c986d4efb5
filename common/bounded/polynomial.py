"""A bounded update without a dense matrix: phi as an odd polynomial, dW as a low-rank product.

For |z| <= c an odd phi is an odd polynomial up to a small error, phi(z) = z (a0 + a1 z^2 + ...).
The entrywise power of a rank-r product is again a low-rank product, of monomials of the factors:

    (A B^T)_ij^n = sum over |m| = n of  n! / (m1! ... mr!)  A_i^m  B_j^m,

which has C(r + n - 1, n) terms.  So ``x dW^T`` is two skinny products, as for LoRA: 24 columns for
rank 4 and degrees 1 and 3.  No matrix of W0's size is made, and autograd does the rest.

The size c is certified at every step: |z_ij| <= frequency * max_i |A_i| * max_j |B_j|.
Where no degree reaches :data:`TOLERANCE`, :mod:`common.bounded.product` takes the exact product.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stable_forgetting.common.bounded.eager import Update, factor_dtype
from stable_forgetting.common.bounded.phi import PHIS, Bound

TOLERANCE = 2.0**-9
"""Largest relative error of an entry of dW: what rounding it to bfloat16 costs."""
DEGREES = ((1,), (1, 3), (1, 3, 5))
SKINNY = 2.0
"""How much more a skinny product costs per multiplication than a square one, for ``auto``."""
ODD = ("sine", "tanh")
_REACHES_PER_OCTAVE = 4
_SMALLEST = 2.0**-8


class OddPolynomial(NamedTuple):
    """An approximation of phi on [-reach, reach].

    Attributes:
        degrees: Odd, ascending.
        coefficients: One per degree.
        error: Largest |p(z) - phi(z)| / |phi(z)|: bounds the relative error of dW.
    """

    degrees: tuple[int, ...]
    coefficients: tuple[float, ...]
    error: float

    def columns(self, rank: int) -> int:
        """Columns of the low-rank product for factors of a rank."""
        return sum(math.comb(rank + n - 1, n) for n in self.degrees)


@cache
def odd_polynomial(phi: str, reach: float) -> OddPolynomial | None:
    """The shortest polynomial whose error is at most :data:`TOLERANCE`; None where none is.

    phi(z) / z is interpolated in z^2 at Chebyshev points, close to the best that a degree allows.
    """
    for degrees in DEGREES:
        fitted = _fit(phi, reach, degrees)
        if fitted.error <= TOLERANCE:
            return fitted
    return None


def _fit(phi: str, reach: float, degrees: tuple[int, ...]) -> OddPolynomial:
    def ratio(squares: np.ndarray) -> np.ndarray:
        z = torch.from_numpy(np.sqrt(np.maximum(squares, 1e-12)))
        return np.asarray((PHIS[phi].value(z) / z).numpy())

    series = np.polynomial.Chebyshev.interpolate(ratio, len(degrees) - 1, domain=[0, reach**2])
    coefficients = tuple(map(float, series.convert(kind=np.polynomial.Polynomial).coef))
    z = torch.linspace(reach / 2000, reach, 2000, dtype=torch.float64)
    value, made = PHIS[phi].value(z), torch.zeros_like(z)
    for a, n in zip(coefficients, degrees, strict=True):
        made = made + a * z**n
    return OddPolynomial(degrees, coefficients, float(((made - value) / value).abs().max()))


@torch.no_grad()
def certified_reach(A: Tensor, Bt: Tensor, frequency: float) -> float:
    """An upper bound of max |frequency A Bt|, from rows of A (k, r) and columns of Bt (r, d)."""
    rows = torch.linalg.vector_norm(A.float(), dim=1).max()
    columns = torch.linalg.vector_norm(Bt.float(), dim=0).max()
    return frequency * float(rows * columns)


def choose(update: Update, *, by_cost: bool) -> OddPolynomial | None:
    """What stands for phi at these factors, or None; ``by_cost``: only where it is less work."""
    A, Bt, bound, start = update
    pairs = [(A, Bt)] if start is None else [(A, Bt), start]
    reach = max(certified_reach(*pair, bound.frequency) for pair in pairs)
    if not math.isfinite(reach) or bound.phi not in ODD:
        return None
    steps = math.ceil(_REACHES_PER_OCTAVE * math.log2(max(reach, _SMALLEST)))
    # a few values per octave, so that few polynomials are fitted
    fitted = odd_polynomial(bound.phi, float(2.0 ** (steps / _REACHES_PER_OCTAVE)))
    if fitted is None or not by_cost:
        return fitted
    # per token it takes 3 columns (k + d) multiplications beside the two products of LoRA; the
    # exact path takes a third k x d product
    columns, k, d = len(pairs) * fitted.columns(A.shape[1]), len(A), Bt.shape[1]
    return fitted if SKINNY * 3 * columns * (k + d) < k * d else None


def polynomial_product(
    x: Tensor, dtype: torch.dtype, update: Update, fitted: OddPolynomial
) -> Tensor:
    """``x dW^T`` for x (..., d), in ``dtype`` or autocast's: (..., k).

    The features are made in the factors' own precision, at least float32.
    """
    A, Bt, bound, start = update
    with torch.autocast(A.device.type, enabled=False):
        left, right = _features(A, Bt, bound, fitted)
        if start is not None:
            left0, right0 = _features(*start, bound, fitted)
            left, right = torch.cat([left, -left0]), torch.cat([right, right0])
    y: Tensor = F.linear(F.linear(x, right.to(dtype)), left.mT.to(dtype))
    return y


def _features(A: Tensor, Bt: Tensor, bound: Bound, fitted: OddPolynomial) -> tuple[Tensor, Tensor]:
    """(columns, k) and (columns, d) whose product is dW; the first carries all weights."""
    wide, root = factor_dtype(A), math.sqrt(bound.frequency)
    left = _powers(A.mT.to(wide) * root, fitted.degrees)
    right = _powers(Bt.to(wide) * root, fitted.degrees)
    weighted = [
        part * (bound.amplitude * a * _multinomials(len(Bt), n).to(part)[:, None])
        for part, a, n in zip(left, fitted.coefficients, fitted.degrees, strict=True)
    ]
    return torch.cat(weighted), torch.cat(right)


def _powers(rows: Tensor, degrees: tuple[int, ...]) -> list[Tensor]:
    """The monomials of rows (r, n) of each degree, (C(r + degree - 1, degree), n)."""
    power, made = rows, {1: rows}
    for degree in range(2, degrees[-1] + 1):
        before, factor = (index.to(rows.device) for index in _steps(len(rows), degree))
        power = power.index_select(0, before) * rows.index_select(0, factor)
        made[degree] = power
    return [made[degree] for degree in degrees]


@cache
def _monomials(rank: int, degree: int) -> tuple[tuple[int, ...], ...]:
    """Which rows each monomial multiplies, ascending."""
    if degree == 1:
        return tuple((row,) for row in range(rank))
    return tuple(
        (*shorter, row)
        for shorter in _monomials(rank, degree - 1)
        for row in range(shorter[-1], rank)
    )


@cache
def _steps(rank: int, degree: int) -> tuple[Tensor, Tensor]:
    """(which monomial of the degree below, which row it is multiplied with)."""
    places = {monomial: i for i, monomial in enumerate(_monomials(rank, degree - 1))}
    chosen = _monomials(rank, degree)
    return (
        torch.tensor([places[monomial[:-1]] for monomial in chosen]),
        torch.tensor([monomial[-1] for monomial in chosen]),
    )


@cache
def _multinomials(rank: int, degree: int) -> Tensor:
    """How often each monomial stands in the expanded power."""
    return torch.tensor(
        [
            math.factorial(degree)
            / math.prod(math.factorial(monomial.count(row)) for row in set(monomial))
            for monomial in _monomials(rank, degree)
        ],
        dtype=torch.float64,
    )
