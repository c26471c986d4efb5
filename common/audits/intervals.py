"""Intervals that audits print: exact for proportions, distribution-free for KS, bootstrap else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from stable_forgetting.common.audits.base import CONFIDENCE, NOT_NEGATIVE, PERCENT, Measure
from stable_forgetting.common.base.seeding import derive

RESAMPLES = 1000
FEW = 30
LARGE = 2000
_CHUNK = 2**22


def clopper_pearson(
    successes: int | np.ndarray, n: int, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Exact two-sided interval of a proportion (Clopper and Pearson, 1934).

    Returns:
        (low, high), of the shape of ``successes``, in [0, 1].
    """
    from scipy.stats import beta

    k = np.asarray(successes, dtype=np.float64)
    tail = (1 - confidence) / 2
    low = np.where(k > 0, beta.ppf(tail, np.maximum(k, 1), n - k + 1), 0.0)
    high = np.where(k < n, beta.ppf(1 - tail, k + 1, np.maximum(n - k, 1)), 1.0)
    return low, high


def proportion(hits: np.ndarray) -> Measure:
    """Share of True in percent with its Clopper-Pearson interval; says so below 30 samples."""
    n = len(hits)
    assert n > 0, "a share of nothing"
    k = int(np.count_nonzero(hits))
    low, high = clopper_pearson(k, n)
    note = f"only {n} samples" if n < FEW else ""
    name = "95 % Clopper-Pearson over samples"
    return Measure(100.0 * k / n, 100.0 * float(low), 100.0 * float(high), name, n, note, PERCENT)


def accuracy(correct: np.ndarray, seed: int) -> Measure:
    """Mean correctness in percent: Clopper-Pearson for 0/1, a bootstrap for shares of tokens."""
    correct = np.asarray(correct, dtype=np.float64)
    if np.isin(correct, (0.0, 1.0)).all():
        return proportion(correct == 1)
    return bootstrap_mean(100.0 * correct, seed, PERCENT)


def dkw(n: int, confidence: float = CONFIDENCE) -> float:
    """Half width of the band around an empirical distribution function.

    Dvoretzky-Kiefer-Wolfowitz with Massart's constant: sqrt(ln(2 / alpha) / (2 n)).
    """
    return math.sqrt(math.log(2 / (1 - confidence)) / (2 * n))


def bootstrap(n: int, statistic: Callable[[np.ndarray], float], seed: int) -> tuple[float, float]:
    """Percentile bootstrap over ``n`` units.

    Args:
        n: Units.
        statistic: (n,) int64 positions, drawn with replacement -> number, or NaN where a
            resample leaves it undefined (those are left out).
    """
    generator = np.random.default_rng(derive(seed, "bootstrap"))
    values = [statistic(generator.integers(0, n, n)) for _ in range(RESAMPLES)]
    return _ends(np.asarray(values))


def bootstrap_mean(
    values: np.ndarray, seed: int, bounds: tuple[float | None, float | None] = NOT_NEGATIVE
) -> Measure:
    """Mean of values with a percentile bootstrap over them (1000 resamples).

    Above 2000 values the normal interval mean +- 1.96 s / sqrt(n) stands for it.

    The interval is about the samples alone: both models stay as they are, and what another
    training would change is not in it.
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    if n > LARGE:
        center, half = float(values.mean()), 1.959964 * float(values.std(ddof=1)) / math.sqrt(n)
        ends = (center - half, center + half)
        return Measure(center, *ends, "95 % normal over samples", n, bounds=bounds)
    generator = np.random.default_rng(derive(seed, "bootstrap"))
    means: list[np.ndarray] = []
    rows = max(1, _CHUNK // n)
    for start in range(0, RESAMPLES, rows):
        draws = generator.integers(0, n, (min(rows, RESAMPLES - start), n))
        means.append(values[draws].mean(axis=1))
    low, high = _ends(np.concatenate(means))
    note = f"only {n} samples" if n < FEW else ""
    return Measure(float(values.mean()), low, high, "95 % bootstrap over samples", n, note, bounds)


def _ends(values: np.ndarray) -> tuple[float, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def spread(values: Sequence[float], unit: str) -> tuple[float, float, str]:
    """(smallest, largest, name) of a handful of repeats, which is no confidence interval."""
    return min(values), max(values), f"range over {len(values)} {unit}"
