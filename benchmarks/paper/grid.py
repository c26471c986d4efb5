"""The values that a two-sample Kolmogorov-Smirnov p-value can have: one per distance D."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache

import numpy as np


@cache
def exact_p(steps: int, n: int, m: int) -> float:
    """P(D >= steps / lcm(n, m)) for n and m values of one continuous distribution.

    Orders of the pooled values are lattice paths from (0, 0) to (n, m), all equally likely.  Each
    path that leaves the band |a/n - b/m| < D is counted where it leaves it first, so that tiny
    values keep their digits.
    """
    whole, log_all = math.lcm(n, m), _log_paths(n, m)
    if n == m:  # by reflection
        logs = [_log_paths(n - k, n + k) - log_all for k in range(steps, n + 1, steps)]
        return min(1.0, 2 * math.fsum((-1) ** i * math.exp(x) for i, x in enumerate(logs)))
    counts, inside = np.zeros(m + 1), np.zeros(m + 1, dtype=bool)
    counts[0], outside = 1.0, 0.0
    b = np.arange(m + 1)
    right, up = whole // n, whole // m
    for a in range(n + 1):
        here = np.abs(a * right - b * up) < steps
        if a:
            left = inside & ~here
            outside += _exits(counts[left], n - a, m - b[left], log_all)
            counts = np.where(inside & here, counts, 0.0)
        counts = np.where(here, np.cumsum(counts), 0.0)
        last = int(np.flatnonzero(here)[-1]) if here.any() else -1
        if 0 <= last < m:
            outside += _exits(counts[[last]], n - a, np.array([m - last - 1]), log_all)
        inside = here
    return min(1.0, outside)


def _exits(counts: np.ndarray, right: int, up: np.ndarray, log_all: float) -> float:
    """Share of all paths that go on from these points, ``right`` and ``up`` steps from the end."""
    from scipy.special import gammaln  # a report without such tables needs no scipy

    chosen = counts > 0
    rest = up[chosen]
    if not len(rest):
        return 0.0
    free = gammaln(right + rest + 1) - math.lgamma(right + 1) - gammaln(rest + 1)
    logs = np.log(counts[chosen]) + free
    return float(np.exp(logs - log_all).sum())


@cache
def _log_paths(right: int, up: int) -> float:
    return math.lgamma(right + up + 1) - math.lgamma(right + 1) - math.lgamma(up + 1)


def nearest_on_grid(target: float, sizes: tuple[int, int]) -> float:
    """The possible p-value that is nearest to a positive one, in its logarithm."""
    n, m = sizes
    whole = math.lcm(n, m)
    place = bisect_left(range(1, whole + 1), -target, key=lambda k: -exact_p(k, n, m)) + 1
    near = [exact_p(k, n, m) for k in (place - 1, place) if 1 <= k <= whole]
    return min(near, key=lambda p: abs(math.log(p / target)))
