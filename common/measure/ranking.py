"""Ranks of rows, with ties and intervals, and what they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

LEVEL = 0.95
"""Share of draws between both ends of an interval."""


def shares(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metric -> its share of the distances of all rows; nothing where no row is at any distance.

    Args:
        parts: Of each row: metric -> its part of the distance; the same metrics in every row.
    """
    sums = {name: math.fsum(row[name] for row in parts) for name in (parts[0] if parts else ())}
    total = math.fsum(sums.values())
    return {name: value / total for name, value in sums.items()} if total else {}


def ranks(values: np.ndarray) -> np.ndarray:
    """(..., N) ranks from 1 of (..., N) values, the smallest first; equal values share the best."""
    return np.asarray(1 + (values[..., None, :] < values[..., :, None]).sum(-1))


def rank_intervals(
    values: np.ndarray,
    trials: Sequence[Sequence[float]] = (),
    *,
    draws: int = 2000,
) -> tuple[np.ndarray, np.ndarray]:
    """(N,) lowest and (N,) highest ranks of rows by their means, under other seeds and trials.

    A draw moves all rows' means together, by Student's t with the covariance that they have over
    the seeds: a hard split is hard for all of them.  (Seeds drawn with replacement would cover the
    true rank in .72 to .92 of tables with three seeds.)  It also takes the trials of every row with
    replacement, and adds what the best of these is further than the best of all.  A row's own rank
    is always between both ends.

    Args:
        values: (N, n) value of every row on every seed.
        trials: Of each row, what each of its trials was worth; infinite where one diverged.
        draws: How many; always the same ones.
    """
    stream = np.random.default_rng(0)
    drawn = values.mean(1) + _of_seeds(values, draws, stream)
    for row, own in enumerate(trials):
        drawn[:, row] += _of_trials(own, draws, stream)
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(ranks(shown(drawn)), ends, axis=0, method="inverted_cdf")
    rank = ranks(shown(values.mean(1)))  # trials move rows outwards alone, so it may lie outside
    return np.minimum(low, rank), np.maximum(high, rank)


def _of_seeds(values: np.ndarray, draws: int, stream: np.random.Generator) -> np.ndarray:
    """(draws, N) moves of the means."""
    n = values.shape[1]
    if n == 1:
        return np.zeros((draws, len(values)))
    deviations = values - values.mean(1, keepdims=True)
    normal = stream.standard_normal((draws, n)) @ deviations.T / math.sqrt(n * (n - 1))
    return np.asarray(normal / np.sqrt(stream.chisquare(n - 1, (draws, 1)) / (n - 1)))


def _of_trials(own: Sequence[float], draws: int, stream: np.random.Generator) -> np.ndarray:
    """(draws,) by how much the best of as many trials, drawn anew, is further."""
    worth = np.array(own, dtype=float)
    if not np.isfinite(worth).any():
        return np.zeros(draws)
    drawn = stream.integers(len(worth), size=(draws, len(worth)))
    return np.asarray(worth[drawn].min(1) - worth.min())


def shown(means: np.ndarray) -> np.ndarray:
    """Means as tables show them, to two decimals: what reads the same is a tie."""
    return np.round(means, 2)
