"""Ranks of rows, with ties and intervals, and what they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


def shares(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metric -> its share of the distances of all rows together; they add up to 1.

    Args:
        parts: Of each row: metric -> its part of the distance; the same metrics in every row.

    Returns:
        Nothing where no row is at any distance.
    """
    sums = {name: math.fsum(row[name] for row in parts) for name in (parts[0] if parts else ())}
    total = math.fsum(sums.values())
    return {name: value / total for name, value in sums.items()} if total else {}


def ranks(values: np.ndarray) -> np.ndarray:
    """(..., N) ranks from 1 of (..., N) values, the smallest first; equal values share the best."""
    return np.asarray(1 + (values[..., None, :] < values[..., :, None]).sum(-1))


def rank_intervals(
    values: np.ndarray, *, level: float = 0.95, draws: int = 2000
) -> tuple[np.ndarray, np.ndarray]:
    """(N,) lowest and (N,) highest ranks of rows by their means, by bootstrap over seeds.

    A draw takes the seeds with replacement, the same ones for all rows: a hard split is hard for
    all of them.  With three seeds there are few ways to draw, and the interval is rather narrow.

    Args:
        values: (N, n) value of every row on every seed.
        level: Share of draws between both ends.
        draws: How many; always the same ones.
    """
    n = values.shape[1]
    chosen = np.random.default_rng(0).integers(n, size=(draws, n))
    drawn = ranks(shown(values[:, chosen].mean(-1).T))
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(drawn, ends, axis=0, method="inverted_cdf")
    return low, high


def shown(means: np.ndarray) -> np.ndarray:
    """Means as tables show them, to two decimals: what reads the same is a tie."""
    return np.round(means, 2)
