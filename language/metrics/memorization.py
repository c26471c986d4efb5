"""Memorisation and membership from per-token log-probabilities and hits.

Tokens of all answers lie one after the other; ``counts`` says how many belong to each.  What is
counted is chosen before: ``clean`` leaves out an end-of-sequence token (every model gets it right),
the peer leaves out the last label whatever it is.
"""

from __future__ import annotations

import numpy as np

from stable_forgetting.common.measure.scores import auc


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)


def exact_memorization(hits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Share of an answer's tokens that the teacher-forced argmax gets right.

    Args:
        hits: (T,) bool.
        counts: (N,) tokens per answer; 0 gives 0.

    Source: Tirumala et al. 2022; (N,) in [0, 1].
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    right = np.bincount(owner, weights=hits.astype(np.float64), minlength=len(counts))
    return right / np.maximum(counts, 1)


def extraction_strength(hits: np.ndarray, counts: np.ndarray, *, floor: bool) -> np.ndarray:
    """1 - k/n with the smallest k from which on every argmax is right (Carlini et al. 2021).

    Args:
        hits: (T,) bool.
        counts: (N,) tokens per answer, n; 0 gives 0.
        floor: The peer's search never reports that nothing matches: 1/n instead of 0.
    """
    ends = _starts(counts) + counts - 1
    last_miss = np.maximum.accumulate(np.where(hits, -1, np.arange(len(hits))))
    suffix = np.zeros(len(counts))
    some = counts > 0
    first = _starts(counts)[some]
    suffix[some] = ends[some] - np.maximum(last_miss[ends[some]], first - 1)
    if floor:
        suffix[some] = np.maximum(suffix[some], 1)
    return suffix / np.maximum(counts, 1)


def min_k(token_loss: np.ndarray, counts: np.ndarray, k: float) -> np.ndarray:
    """Mean loss of the ``max(1, int(k n))`` least likely tokens (Min-k %, Shi et al. 2024).

    Args:
        token_loss: (T,) nats.
        counts: (N,) tokens per answer; 0 gives 0.
        k: Share in (0, 1].

    Returns:
        (N,) float64; lower for texts that the model knows.
    """
    order = np.lexsort((-token_loss, np.repeat(np.arange(len(counts)), counts)))
    sums = np.concatenate([[0.0], np.cumsum(token_loss[order], dtype=np.float64)])
    taken = np.minimum(np.maximum(1, (counts * k).astype(np.int64)), counts)
    first = _starts(counts)
    return (sums[first + taken] - sums[first]) / np.maximum(taken, 1)


def membership_auc(members: np.ndarray, others: np.ndarray) -> float:
    """Chance that a member's loss is below another's, ties counted half; 1 gives all away."""
    lower, higher = (-np.asarray(losses, dtype=np.float64) for losses in (members, others))
    return auc(lower, higher) / 100


def privacy_leakage(auc: float, reference_auc: float, *, epsilon: float = 0.0) -> float | None:
    """Relative change of 1 - AUC against the retrained model's, in percent (MUSE's PrivLeak).

    Below 0 the forget set is still known, above 0 it is conspicuously unknown.  None where the
    retrained model's AUC is 1.
    """
    base = 1 - reference_auc + epsilon
    return None if base == 0 else 100.0 * ((1 - auc) - (1 - reference_auc)) / base
