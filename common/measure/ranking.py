"""How well one number ranks two groups apart."""

from __future__ import annotations

import numpy as np


def auc(positives: np.ndarray, negatives: np.ndarray) -> float:
    """P(positive > negative), ties counted half, in percent; 50 is chance.

    Args:
        positives: (N,) scores.
        negatives: (M,) scores.
    """
    ordered = np.sort(negatives)
    below = np.searchsorted(ordered, positives, side="left")
    upto = np.searchsorted(ordered, positives, side="right")
    return 100.0 * float(np.mean(below + upto)) / (2 * len(negatives))
