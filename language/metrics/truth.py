"""Probabilities and truth ratios from answer losses, in the conventions of three code bases.

With L the mean loss per token of an answer (nats), Lc that of the right answer (its paraphrase,
where the data have one) and Lw the mean of the wrong answers' L, the truth ratio of a sample is
``r = exp(Lc - Lw)``: wrong over right.  The TOFU paper writes an arithmetic mean over the wrong
answers' probabilities; its code, its published logs and every later code base take the geometric
one, and so do we, in all styles.

Styles:
    ``clean`` and ``tofu``: exp(Lc - Lw) in log space, as the original aggregation code does.
    ``openunlearning``: exp(-Lw) / (exp(-Lc) + 1e-10).  For a collapsed model (L above 20) the
        1e-10 outweighs the probability, and r tends to 0 whatever the truth is.

Requests in turn (O3, Gao et al. 2024, "On Large Language Model Continual Unlearning"): after each
request, accuracy on the rows that it used (S.U.), on rows of its authors that it did not use
(D.U.), and on retained authors (R.D., higher is better).  The goal of S.U. and D.U. is Retrain's
value: it chooses right by chance and by what it knows of other authors, and a model below it has
forgotten too much.  The original asks the paraphrased question, embeds the generated answer with
paraphrase-MiniLM-L6-v2 and counts it as right if the paraphrased answer is nearer than every
perturbed one.  Here an answer counts as right if the model finds the paraphrase likelier per token
than every perturbed answer to the same question: the same choice, but not the original's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from stable_forgetting.language.config import Style

Truth = Literal["ratio", "mass"]
Columns = Mapping[str, np.ndarray]
"""Per-sample measurements of one part; see :func:`language.measure.scoring.score_parts`."""

EPSILON = 1e-10
"""What the peer adds to denominators."""


def columns_of(scores: Mapping[str, Any]) -> dict[str, Columns]:
    """Part -> per-sample columns, of :class:`common.measure.scores.Scores` or of plain mappings."""
    return {part: getattr(value, "extra", value) for part, value in scores.items()}


def compared(columns: Columns) -> np.ndarray:
    """(N,) bool: which samples have wrong answers to compare with."""
    if "perturbed_loss" not in columns:
        return np.zeros(len(columns["answer_loss"]), dtype=bool)
    if "perturbed_count" in columns:
        return np.asarray(columns["perturbed_count"]) > 0
    return np.full(len(columns["answer_loss"]), columns["perturbed_loss"].shape[1] > 0)


def losses(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Lc and Lw, (M,) float64 each, of the M samples that have wrong answers."""
    rows = compared(columns)
    right = np.asarray(columns["paraphrase_loss"], dtype=np.float64)[rows]
    wrong, present = wrong_losses(columns, rows)
    return right, (wrong * present).sum(axis=1) / present.sum(axis=1)


def wrong_losses(columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(M, K) losses of wrong answers and which of them exist."""
    wrong = np.asarray(columns["perturbed_loss"], dtype=np.float64)[rows]
    if "perturbed_count" not in columns:
        return wrong, np.ones_like(wrong, dtype=bool)
    return wrong, np.arange(wrong.shape[1]) < np.asarray(columns["perturbed_count"])[rows, None]


def probabilities(columns: Columns) -> np.ndarray:
    """(N,) exp(-L) of the answer: the geometric mean of its token probabilities."""
    return np.exp(-np.asarray(columns["answer_loss"], dtype=np.float64))


def normalised_probabilities(columns: Columns, style: Style) -> np.ndarray:
    """(M,) p / (p + sum of the wrong answers' p), p = exp(-L): 'probability with options'."""
    rows = compared(columns)
    right = np.asarray(columns["answer_loss"], dtype=np.float64)[rows]
    wrong, present = wrong_losses(columns, rows)
    if style == "openunlearning":
        p, others = np.exp(-right), (np.exp(-wrong) * present).sum(axis=1)
        return p / (p + others + EPSILON)
    wrong = np.where(present, wrong, np.inf)  # a factor 0 would make NaN of a padded overflow
    least = np.minimum(right, wrong.min(axis=1))
    others = np.exp(least[:, None] - wrong).sum(axis=1)
    p = np.exp(least - right)
    return p / (p + others)


def options(columns: Columns) -> np.ndarray | None:
    """(N, 1 + K) p / (sum of p), p = exp(-L): the right answer first, then the wrong ones.

    A question with fewer wrong answers than K has zeros at its end.  None unless every sample has
    wrong answers.
    """
    rows = compared(columns)
    if not rows.all():
        return None
    wrong, present = wrong_losses(columns, rows)
    loss = np.concatenate(
        [np.asarray(columns["answer_loss"])[:, None], np.where(present, wrong, np.inf)], axis=1
    )
    weights = np.exp(loss.min(axis=1, keepdims=True) - loss)
    return weights / weights.sum(axis=1, keepdims=True)


def log_truth_ratios(columns: Columns) -> np.ndarray:
    """(M,) Lc - Lw = log r, exact however unlikely the answers are."""
    right, wrong = losses(columns)
    return right - wrong


def truth_ratios(columns: Columns, style: Style) -> np.ndarray:
    """(M,) r = P(wrong) / P(right)."""
    if style != "openunlearning":
        with np.errstate(over="ignore"):
            return np.exp(log_truth_ratios(columns))
    right, wrong = losses(columns)
    return np.exp(-wrong) / (np.exp(-right) + EPSILON)


def tested(columns: Columns, style: Style) -> np.ndarray:
    """(M,) what the Kolmogorov-Smirnov test compares: r, or log r, which has the same ranks."""
    if style == "openunlearning":
        return truth_ratios(columns, style)
    return log_truth_ratios(columns)


def closeness(columns: Columns, style: Style) -> np.ndarray:
    """(M,) min(r, 1/r): 1 where right and wrong are equally likely; the forget set's aggregate."""
    if style != "openunlearning":
        return np.exp(-np.abs(log_truth_ratios(columns)))
    ratios = truth_ratios(columns, style)
    return np.minimum(ratios, 1 / (ratios + EPSILON))


def preference(columns: Columns, style: Style) -> np.ndarray:
    """(M,) max(0, 1 - r): how clearly the right answer is preferred; all other sets' aggregate."""
    if style != "openunlearning":
        return np.maximum(0.0, -np.expm1(np.minimum(log_truth_ratios(columns), 0.0)))
    return np.maximum(0.0, 1 - truth_ratios(columns, style))


def mass(columns: Columns, style: Style) -> np.ndarray:
    """(M,) P(right) / (P(right) + P(wrong)): the definition of arXiv 2506.12618, an option."""
    right, wrong = losses(columns)
    if style == "openunlearning":
        p = np.exp(-right)
        return p / (p + np.exp(-wrong) + EPSILON)
    from scipy.special import expit

    return expit(wrong - right)


# Sample-level unlearning, distribution-level unlearning, retained distribution --------------------

SEQUENTIAL_PARTS = {"su": "forget", "su_earlier": "earlier", "du": "unused", "rd": "retain"}
"""Metric -> part."""


def chosen_right(columns: Columns) -> np.ndarray:
    """(M,) bool: whether the paraphrase is likelier than every wrong answer; a tie is wrong."""
    rows = compared(columns)
    right = np.asarray(columns["paraphrase_loss"])[rows]
    wrong, present = wrong_losses(columns, rows)
    return right < np.where(present, wrong, np.inf).min(axis=1)


def sequential_metrics(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """The accuracies in percent that the parts allow; None where a part has no wrong answers.

    Args:
        scores: Part -> Scores, or their extra columns.
    """
    parts = columns_of(scores)
    return {
        name: 100.0 * float(right.mean()) if len(right) else None
        for name, part in SEQUENTIAL_PARTS.items()
        if part in parts
        for right in [chosen_right(parts[part])]
    }
