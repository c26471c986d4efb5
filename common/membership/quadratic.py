"""Minimises the dual of a support vector machine whose kernel has a low rank.

Programme: |sum_i a_i s_i g_i|^2 / 2 - sum_i a_i over 0 <= a_i <= limit_i with sum_i a_i s_i = 0.
An interior-point step solves with a diagonal plus rank r (Fine and Scheinberg, JMLR 2001; Ferris
and Munson, SIAM J. Optim. 2002), so it costs n r^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

AT_BOUND = 1e-7
"""Share of its limit within which a variable counts as lying on its bound."""
MAX_STEPS = 60
_SHORTER = 0.995


@dataclass(frozen=True)
class Programme:
    """What to minimise.

    Attributes:
        features: (n, r) float64 rows g_i.
        signs: (n,) float64, 1 or -1.
        limits: (n,) float64, positive.
    """

    features: np.ndarray
    signs: np.ndarray
    limits: np.ndarray

    def values(self, alpha: np.ndarray) -> np.ndarray:
        """(n,) decision values without intercept: g_i . sum_j a_j s_j g_j."""
        values: np.ndarray = self.features @ ((alpha * self.signs) @ self.features)
        return values

    def optimality(
        self, alpha: np.ndarray, values: np.ndarray, among: np.ndarray | bool = True
    ) -> tuple[float, float]:
        """(violation, intercept): libsvm's stopping quantity m - M, and the middle of the two.

        Only samples ``among`` (a mask) are looked at.  Source: Fan, Chen and Lin, JMLR 2005, eq. 6.
        """
        slack = self.signs - values
        below, above = (alpha < self.limits) & among, (alpha > 0) & among
        up = np.where(self.signs > 0, below, above)
        low = np.where(self.signs > 0, above, below)
        most = slack[up].max(initial=-np.inf)
        least = slack[low].min(initial=np.inf)
        return float(most - least), float(most + least) / 2


@dataclass(frozen=True)
class _Point:
    """Variables with the multipliers of both bounds, all positive, and the intercept."""

    alpha: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    intercept: float


def minimise(programme: Programme, tolerance: float) -> np.ndarray | None:
    """(n,) variables whose violation of optimality is at most ``tolerance``.

    Mehrotra's predictor-corrector method; variables at a bound lie on it exactly.

    Returns:
        None if there is no such point within ``MAX_STEPS`` steps.
    """
    ones, limits = np.ones(len(programme.signs)), programme.limits
    point = _Point(limits / 2, ones, ones, 0.0)
    with np.errstate(all="ignore"):
        for _ in range(MAX_STEPS):
            try:
                point = _step(programme, point)
            except (LinAlgError, ValueError):  # singular, or no longer finite
                return None
            alpha = np.where(point.alpha > limits * (1 - AT_BOUND), limits, point.alpha)
            alpha = np.where(alpha < limits * AT_BOUND, 0.0, alpha)
            violation, _ = programme.optimality(alpha, programme.values(alpha))
            unbalanced = abs(alpha @ programme.signs)
            if violation <= tolerance and unbalanced <= AT_BOUND * limits.sum():
                return alpha
    return None


def _step(programme: Programme, at: _Point) -> _Point:
    """One predictor-corrector step."""
    signs, alpha, room = programme.signs, at.alpha, programme.limits - at.alpha
    dual = signs * (programme.values(alpha) + at.intercept) - 1.0 - at.lower + at.upper
    primal = float(signs @ alpha)
    solve = _solver(programme, at.lower / alpha + at.upper / room)
    along = solve(signs)

    def move(low: np.ndarray, high: np.ndarray) -> _Point:
        """The Newton direction towards alpha lower = low + ..., room upper = high + ..."""
        free = solve(low / alpha - high / room - dual)
        shift = (float(signs @ free) + primal) / float(signs @ along)
        step = free - shift * along
        lower, upper = (low - at.lower * step) / alpha, (high + at.upper * step) / room
        return _Point(step, lower, upper, shift)

    gap = float(alpha @ at.lower + room @ at.upper)
    guess = move(-alpha * at.lower, -room * at.upper)
    reach = _reach(programme, at, guess)
    then = _moved(at, guess, reach)
    left = float(then.alpha @ then.lower + (programme.limits - then.alpha) @ then.upper)
    target = (left / gap) ** 3 * gap / (2 * len(alpha))
    direction = move(
        target - alpha * at.lower - guess.alpha * guess.lower,
        target - room * at.upper + guess.alpha * guess.upper,
    )
    return _moved(at, direction, _SHORTER * _reach(programme, at, direction))


def _solver(programme: Programme, diagonal: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """v -> (diag + S G G' S)^-1 v, by the Woodbury identity."""
    rows = (programme.signs / np.sqrt(diagonal))[:, None] * programme.features
    small = rows.T @ rows
    small[np.diag_indices_from(small)] += 1.0
    factor = cho_factor(small)
    root = np.sqrt(diagonal)

    def solve(vector: np.ndarray) -> np.ndarray:
        scaled = vector / root
        solution: np.ndarray = (scaled - rows @ cho_solve(factor, rows.T @ scaled)) / root
        return solution

    return solve


def _reach(programme: Programme, at: _Point, direction: _Point) -> float:
    """The longest step, at most 1, that keeps everything positive."""
    pairs = (
        (at.alpha, direction.alpha),
        (programme.limits - at.alpha, -direction.alpha),
        (at.lower, direction.lower),
        (at.upper, direction.upper),
    )
    fastest = max(float((-change / value).max()) for value, change in pairs)
    return min(1.0, 1.0 / fastest) if fastest > 0 else 1.0


def _moved(at: _Point, by: _Point, length: float) -> _Point:
    return _Point(
        at.alpha + length * by.alpha,
        at.lower + length * by.lower,
        at.upper + length * by.upper,
        at.intercept + length * by.intercept,
    )
