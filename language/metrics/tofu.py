"""The TOFU benchmark's numbers from per-sample columns: one model's, and against Retrain.

Source: Maini et al. 2024 (arXiv 2401.06121) and the aggregation code of its repository; the peer's
conventions are those of open-unlearning.  Percent, but for the utilities and p-values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.measure.gaps import harmonic_mean, ks_two_sample
from stable_forgetting.language.config import Style
from stable_forgetting.language.metrics.memorization import membership_auc, privacy_leakage
from stable_forgetting.language.metrics.truth import (
    EPSILON,
    Columns,
    Truth,
    closeness,
    columns_of,
    compared,
    log_truth_ratios,
    mass,
    normalised_probabilities,
    preference,
    probabilities,
    tested,
)

FQReference = Literal["tofu", "loku"]

PARTS = {
    "forget": "forget",
    "retain": "retain",
    "ra": "test_real_authors",
    "wf": "test_world_facts",
}
"""Prefix of metric names -> part."""

HOLDOUT = "holdout"
LOKU_PART = "loku_reference"
"""Part that ``fq_reference: loku`` compares with: the first 300 rows of forget10."""

LOKU_ROWS = 300
RATES = tuple(
    f"{part}_{what}" for part in ("forget", "retain") for what in ("prob", "rouge", "truth_ratio")
)
"""What tables show of the forget set and of the retain set."""

MOST_PROBABLE = 0.999
"""A token of higher probability counts as this one: beyond it, nothing of interest is learnt."""


def tofu_metrics(
    scores: Mapping[str, Any], *, style: Style = "clean", truth: Truth = "ratio"
) -> dict[str, float | None]:
    """Everything that one model's scores say, as far as the parts and columns are there.

    Args:
        scores: Part (values of :data:`PARTS`, ``holdout``) -> Scores or their extra columns.
        truth: What ``*_truth_ratio`` averages: aggregates of the ratio, or the right answer's
            share of the probability mass.
    """
    parts = columns_of(scores)
    metrics: dict[str, float | None] = {}
    for prefix, part in PARTS.items():
        if part in parts:
            metrics |= _part_metrics(prefix, parts[part], style, truth)
    for name in ("extraction_strength", "exact_memorization"):
        if name in parts.get("forget", {}):
            metrics[name] = 100.0 * _mean(parts["forget"][name])
    metrics["min_k_auc"] = _auc_percent(parts)
    metrics["mu"] = _utility(metrics, ("prob", "rouge", "truth_ratio"))
    metrics["mu_likelihood"] = _utility(metrics, ("prob", "truth_ratio"))
    return metrics


def log_odds(columns: Columns) -> np.ndarray:
    """(N,) log p / (1 - p) of a token of each answer, p = exp(-loss), ascending; nats.

    The loss itself, with its sign turned, where p is small; where p is near 1 the log of the loss.
    So neither end saturates, down to a loss of any size and up to :data:`MOST_PROBABLE`.
    """
    losses = np.asarray(columns["answer_loss"], dtype=np.float64)
    losses = np.sort(losses.clip(min=-math.log(MOST_PROBABLE)))[::-1]
    return np.asarray(-losses - np.log(-np.expm1(-losses)))


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64))


def _part_metrics(
    prefix: str, columns: Columns, style: Style, truth: Truth
) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {}
    options = prefix in ("ra", "wf")
    odds = log_odds(columns)
    if prefix == "forget":
        half = -(-len(odds) // 2)
        metrics |= {"odds_rest": _mean(odds[:half]), "odds_top": _mean(odds[-half:])}
    else:
        metrics["odds"] = _mean(odds)
    if not options:
        metrics["prob"] = 100.0 * _mean(probabilities(columns))
    if compared(columns).any():
        if options:
            metrics["prob"] = 100.0 * _mean(normalised_probabilities(columns, style))
        if prefix == "forget":
            metrics["log_ratio"] = _mean(log_truth_ratios(columns))
        ratio = closeness if prefix == "forget" else preference
        metrics["truth_ratio"] = 100.0 * _mean((mass if truth == "mass" else ratio)(columns, style))
    if "rouge_l_recall" in columns:
        metrics["rouge"] = 100.0 * _mean(columns["rouge_l_recall"])
    return {f"{prefix}_{name}": value for name, value in metrics.items()}


def _utility(metrics: Mapping[str, float | None], what: tuple[str, ...]) -> float | None:
    values = [metrics.get(f"{prefix}_{name}") for prefix in ("retain", "ra", "wf") for name in what]
    return harmonic_mean([None if value is None else value / 100 for value in values])


def _auc_percent(parts: Mapping[str, Columns]) -> float | None:
    """Min-k AUC of forget against holdout, or None where nothing was held out."""
    if "min_k" not in parts.get("forget", {}) or "min_k" not in parts.get(HOLDOUT, {}):
        return None
    return 100.0 * membership_auc(parts["forget"]["min_k"], parts[HOLDOUT]["min_k"])


def tofu_compare(
    scores: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    style: Style = "clean",
    fq_reference: FQReference = "tofu",
) -> dict[str, float | None]:
    """Forget quality and privacy leakage against the retrained model.

    Args:
        scores: The unlearned model's.
        reference: The retrained model's, on the same parts.
        style: Conventions.
        fq_reference: ``tofu`` compares the same rows.  ``loku`` is what LoKU's scripts do: at most
            300 rows of the forget set against the first 300 rows of forget10 under the model
            retrained without forget10, whatever was forgotten: 40 against 300 for forget01.

    Raises:
        DataError: ``loku`` without its part in the reference.
    """
    ours, theirs = columns_of(scores), columns_of(reference)
    names = ("fq", "log10_fq", "ks", "log10_fq_300", "privleak")
    metrics: dict[str, float | None] = dict.fromkeys(names)
    if "forget" in ours and compared(ours["forget"]).any():
        first = tested(ours["forget"], style)
        second = _reference_statistic(theirs, style, fq_reference)
        rows = LOKU_ROWS if fq_reference == "loku" else None
        metrics |= forget_quality(first[:rows], second[:rows])
        if min(len(first), len(second)) >= LOKU_ROWS:
            few = forget_quality(first[:LOKU_ROWS], second[:LOKU_ROWS])
            metrics["log10_fq_300"] = few["log10_fq"]
    auc, base = _auc_percent(ours), _auc_percent(theirs)
    if auc is not None and base is not None:
        epsilon = EPSILON if style == "openunlearning" else 0.0
        metrics["privleak"] = privacy_leakage(auc / 100, base / 100, epsilon=epsilon)
    return metrics


def _reference_statistic(
    parts: Mapping[str, Columns], style: Style, fq_reference: FQReference
) -> np.ndarray:
    part = "forget" if fq_reference == "tofu" else LOKU_PART
    if part not in parts:
        raise DataError(
            f"fq_reference {fq_reference} needs the retrained model's scores of part '{part}'"
        )
    return tested(parts[part], style)


def forget_quality(first: np.ndarray, second: np.ndarray) -> dict[str, float | None]:
    """``fq``, ``log10_fq`` and ``ks`` of two arrays of truth ratios (or any monotone map of them).

    Two-sided and exact (up to 10,000 values a side; SciPy falls back to the limit law, and says
    so, where p is 1 to all digits).  A p-value below the smallest double counts as that: log10
    -323.3.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ks_2samp: Exact calculation unsuccessful")
        test = ks_two_sample(first, second)  # type: ignore[arg-type]
    return {
        "fq": test.p_value,
        "log10_fq": math.log10(max(test.p_value, math.ulp(0.0))),
        "ks": test.statistic,
    }
