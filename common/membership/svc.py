"""A support vector machine on few features, fast: the membership attack fits one per metric.

The samples of an attack are many and their kernel is smooth, so the kernel matrix has a small
numerical rank.  A pivoted Cholesky factor of that rank (Fine and Scheinberg, JMLR 2001) makes the
fit a quadratic programme that takes some twenty cheap steps.  What it gives is used only if it
meets libsvm's own stopping rule (Fan, Chen and Lin, JMLR 2005) on the exact kernel at libsvm's
default tolerance; otherwise, and where there are few samples, libsvm itself is asked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from stable_forgetting.common.membership.quadratic import Programme, minimise

logger = logging.getLogger(__name__)

Decision = Callable[[np.ndarray], np.ndarray]
"""(M, d) float64 -> (M,) bool: is it on the positive side?"""

COST = 3.0
TOLERANCE = 1e-3
"""Largest violation of optimality, in units of the decision value: libsvm's default."""
SOLVER_TOLERANCE = 1e-4
ERRORS = (0.05, 5e-3, 4e-4)
"""Bounds of the error of a decision value through the low rank, tried in turn."""
FREE_RANK, MAX_RANK = 96, 512
"""Up to the first the last of ``ERRORS`` is aimed at anyway; above the second is libsvm's."""
MIN_SAMPLES = 500
"""Distinct samples below which libsvm takes milliseconds."""
_CHUNK = 2**22


@dataclass(frozen=True)
class Problem:
    """Distinct samples of two sides.

    Attributes:
        samples: (n, d) float64, distinct within each side.
        signs: (n,) float64, 1 or -1.
        limits: (n,) float64, upper bounds of the dual variables: C times how often it occurs.
        gamma: Of the kernel exp(-gamma |x - x'|^2).
    """

    samples: np.ndarray
    signs: np.ndarray
    limits: np.ndarray
    gamma: float

    def values(self, weights: np.ndarray, points: np.ndarray) -> np.ndarray:
        """(M,) sum_i weights_i k(x_i, point), exact."""
        support = np.flatnonzero(weights)
        samples, weights = self.samples[support], weights[support]
        parts = np.array_split(points, max(1, len(points) * len(support) // _CHUNK))
        return np.concatenate([_kernel(part, samples, self.gamma) @ weights for part in parts])


def fit_svc(positive: np.ndarray, negative: np.ndarray) -> Decision:
    """Fits an RBF support vector machine, C = 3, gamma = 1 / d, and returns its decisions.

    Equal samples become one with a higher limit, which is the same programme.
    """
    problem = merged(positive, negative)
    return fit_low_rank(problem) or fit_libsvm(problem)


def merged(positive: np.ndarray, negative: np.ndarray) -> Problem:
    """The problem on distinct samples; arguments as of :func:`fit_svc`."""
    sides = [np.unique(side, axis=0, return_counts=True) for side in (positive, negative)]
    return Problem(
        samples=np.concatenate([distinct for distinct, _ in sides]),
        signs=np.repeat([1.0, -1.0], [len(distinct) for distinct, _ in sides]),
        limits=COST * np.concatenate([counts for _, counts in sides]),
        gamma=1.0 / positive.shape[1],
    )


def fit_libsvm(problem: Problem) -> Decision:
    """scikit-learn's fit; its C is 1, as the limits hold it already."""
    from sklearn.svm import SVC

    machine = SVC(C=1.0, gamma=problem.gamma, kernel="rbf", tol=TOLERANCE, cache_size=500)
    machine.fit(problem.samples, problem.signs, sample_weight=problem.limits)

    def decide(points: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(points, axis=0, return_inverse=True)
        positive: np.ndarray = machine.predict(distinct) > 0
        return positive[inverse.reshape(-1)]

    return decide


def fit_low_rank(problem: Problem) -> Decision | None:
    """Decisions of a certified optimum; None where it does not pay or there is none."""
    if len(problem.samples) < MIN_SAMPLES:
        return None
    for error in ERRORS:
        kernel = low_rank_kernel(problem, error)
        if kernel is None:
            break
        if (solution := certified_optimum(problem, kernel)) is not None:
            return functools.partial(_decide, problem, kernel, *solution)
        if kernel.error <= ERRORS[-1]:
            break
    logger.info("no certified low-rank fit of %d samples: libsvm", len(problem.samples))
    return None


# The kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LowRankKernel:
    """``features @ features.T`` is the kernel matrix up to a positive semidefinite rest E.

    |E_ij| <= sqrt(E_ii E_jj), so dual variables within their limits move the value of sample j by
    at most sqrt(E_jj) ``reach``, where ``reach`` is sum_i limit_i sqrt(E_ii).

    Attributes:
        features: (n, r) float64.
        pivots: (r, d) the samples that span it.
        factor: (r, r) their features, lower triangular.
        reach: As above; also bounds what a point without features can be moved by.
        error: The largest such movement of a sample.
    """

    features: np.ndarray
    pivots: np.ndarray
    factor: np.ndarray
    reach: float
    error: float


def low_rank_kernel(problem: Problem, error: float) -> LowRankKernel | None:
    """Pivoted Cholesky factor with at most this ``error``; None above ``MAX_RANK``."""
    samples = problem.samples
    rest = np.ones(len(samples))
    rows = np.empty((min(MAX_RANK, len(samples)), len(samples)))
    pivots: list[int] = []
    for rank, row in enumerate(rows):
        pivot = int(rest.argmax())
        reach = float(problem.limits @ np.sqrt(rest))
        bound = reach * float(np.sqrt(rest[pivot]))
        if bound <= (ERRORS[-1] if rank < FREE_RANK else error):
            features = np.ascontiguousarray(rows[:rank].T)
            return LowRankKernel(features, samples[pivots], features[pivots], reach, bound)
        row[:] = _kernel(samples, samples[pivot : pivot + 1], problem.gamma)[:, 0]
        row -= rows[:rank, pivot] @ rows[:rank]
        row /= np.sqrt(rest[pivot])
        pivots.append(pivot)
        rest = np.maximum(rest - row * row, 0.0)
        rest[pivots] = 0.0
    return None


def _kernel(first: np.ndarray, second: np.ndarray, gamma: float) -> np.ndarray:
    """(n, m) exp(-gamma |x - x'|^2)."""
    squares = first @ (-2.0 * second.T)
    squares += (first * first).sum(1)[:, None]
    squares += (second * second).sum(1)
    squares *= -gamma
    return np.exp(np.minimum(squares, 0.0, out=squares), out=squares)


def _decide(
    problem: Problem,
    kernel: LowRankKernel,
    weights: np.ndarray,
    intercept: float,
    points: np.ndarray,
) -> np.ndarray:
    """(M,) bool: signs of the exact decision values, most of them known from the features."""
    near = _kernel(kernel.pivots, points, problem.gamma)
    features = solve_triangular(kernel.factor, near, lower=True)
    values = (weights @ kernel.features) @ features + intercept
    rest = np.maximum(1.0 - (features * features).sum(0), 0.0)
    unsure = np.flatnonzero(np.abs(values) <= kernel.reach * np.sqrt(rest))
    values[unsure] = problem.values(weights, points[unsure]) + intercept
    positive: np.ndarray = values > 0
    return positive


# The fit -----------------------------------------------------------------------------------------


def certified_optimum(problem: Problem, kernel: LowRankKernel) -> tuple[np.ndarray, float] | None:
    """(n,) dual variables times signs, and the intercept, optimal for the exact kernel.

    Where the bound of the low rank's error does not prove it, samples near the margin, whose side
    that error could change, get exact values.  None if it is not true, and where no dual variable
    is free: any intercept between two bounds is optimal then, and libsvm's rounding picks one.
    """
    whole = Programme(kernel.features, problem.signs, problem.limits)
    alpha = minimise(whole, SOLVER_TOLERANCE)
    if alpha is None:
        return None
    values = whole.values(alpha)
    violation, intercept = whole.optimality(alpha, values)
    if violation < -TOLERANCE:
        return None
    if violation + 2 * kernel.error <= TOLERANCE:
        return alpha * whole.signs, intercept
    near = ~_far(whole, alpha, values + intercept, 2 * kernel.error)
    values[near] = problem.values(alpha * whole.signs, problem.samples[near])
    violation, intercept = whole.optimality(alpha, values, near)
    proven = _far(whole, alpha, values + intercept, kernel.error) | near
    return (alpha * whole.signs, intercept) if violation <= TOLERANCE and proven.all() else None


def _far(whole: Programme, alpha: np.ndarray, values: np.ndarray, error: float) -> np.ndarray:
    """(n,) bool: at a bound that stays right if the value is wrong by ``error``."""
    margin = whole.signs * values - 1.0
    inside, outside = alpha == whole.limits, alpha == 0.0
    far: np.ndarray = (inside & (margin <= -error)) | (outside & (margin >= error))
    return far
