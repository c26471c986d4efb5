"""Do two models answer alike?  Distances per sample, from the scores of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from stable_forgetting.common.measure.scores import Scores

_TINY = 1e-38


def kl_rows(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """(N,) KL(p || q) in nats of (N, C) distributions; q is floored at 1e-38, 0 ln 0 is 0."""
    ratio = np.log(np.maximum(p, _TINY)) - np.log(np.maximum(q, _TINY))
    divergences: np.ndarray = np.where(p > 0, p * ratio, 0.0).sum(axis=1)
    return divergences


def js_rows(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """(N,) Jensen-Shannon divergence in nats of (N, C) distributions, 0 to ln 2."""
    middle = (p + q) / 2
    divergences: np.ndarray = np.maximum((kl_rows(p, middle) + kl_rows(q, middle)) / 2, 0.0)
    return divergences


def answer_distances(
    scores: Mapping[str, Scores],
    target: Mapping[str, Scores],
    parts: Iterable[str],
    choices: Callable[[Scores], np.ndarray | None],
) -> dict[str, float | None]:
    """How differently two models answer, averaged over the samples of each part.

    Args:
        choices: A part's scores -> (N, C), how likely each answer of a sample is to the model;
            None where a sample has none to choose from.

    Returns:
        ``js_PART``: mean Jensen-Shannon divergence in nats; ``changed_PART``: percent of the
        samples on which both models choose different answers.  None where a side has no choices
        or the samples are not the same.
    """
    distances: dict[str, float | None] = {}
    for part in parts:
        pair = [side[part] for side in (scores, target) if part in side]
        found = [chosen for side in pair if (chosen := choices(side)) is not None]
        known = len(found) == 2 and np.array_equal(pair[0].indices, pair[1].indices)
        likely = [chosen.astype(np.float64) for chosen in found]
        changed = [p.argmax(1) for p in likely]
        distances[f"js_{part}"] = float(js_rows(*likely).mean()) if known else None
        distances[f"changed_{part}"] = (
            100.0 * float((changed[0] != changed[1]).mean()) if known else None
        )
    return distances
