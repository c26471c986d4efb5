"""Sample-level unlearning, distribution-level unlearning and retained distribution (O3).

After each of several requests: accuracy on the rows that the request used (S.U.), on rows of its
authors that it did not use (D.U.), and on retained authors (R.D., higher is better).  The goal of
S.U. and D.U. is Retrain's value: it chooses right by chance and by what it knows of other authors,
and a model below it has forgotten too much.  Source: Gao et al. 2024, "On Large Language Model
Continual Unlearning".

The original asks the paraphrased question, embeds the generated answer with
paraphrase-MiniLM-L6-v2 and counts it as right if the paraphrased answer is nearer than every
perturbed one.  Here nothing is generated or embedded: an answer counts as right if the model finds
the paraphrase likelier per token than every perturbed answer to the same question.  The choice is
among the same texts; the numbers are not those of the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.language.metrics.tofu import columns_of
from stable_forgetting.language.metrics.truth import Columns, compared, wrong_losses

PARTS = {
    "su": "forget",
    "su_earlier": "earlier",
    "du": "unused",
    "rd": "retain",
}
"""Metric -> part."""

SEQUENTIAL_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("su", "target", "S.U.", doc="accuracy on the rows of this request, by likelihood"),
    MetricSpec("su_earlier", "target", "S.U. old", doc="the same on rows of earlier requests"),
    MetricSpec("du", "target", "D.U.", doc="the same on rows of the request that were not used"),
    MetricSpec("rd", "higher", "R.D.", doc="the same on retained authors"),
)


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
        for name, part in PARTS.items()
        if part in parts
        for right in [chosen_right(parts[part])]
    }
