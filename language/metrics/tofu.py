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
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.language.config import Style
from stable_forgetting.language.metrics.memorization import membership_auc, privacy_leakage
from stable_forgetting.language.metrics.truth import (
    EPSILON,
    Columns,
    Truth,
    closeness,
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

_SETS = {
    "forget": "the forget set",
    "retain": "retained authors",
    "ra": "real authors",
    "wf": "world facts",
}


def _odds(name: str, title: str, where: str) -> tuple[MetricSpec, ...]:
    doc = f"mean log odds of a token in the {where}: log p / (1 - p), p = exp(-loss)"
    return (MetricSpec(name, "target", title, unit="nats per token", digits=2, doc=doc),)


_HEADLINES = (
    MetricSpec(
        "log10_fq",
        "higher",
        "log10 FQ",
        unit="",
        doc="log10 p of the two-sided Kolmogorov-Smirnov test that the truth ratios "
        "on the forget set are those of the retrained model; 0 is the best",
    ),
    MetricSpec(
        "mu",
        "higher",
        "MU",
        unit="",
        digits=3,
        doc="model utility: harmonic mean of probability, ROUGE-L recall and truth ratio on "
        "retained authors, real authors and world facts",
    ),
)
_FURTHER = (
    MetricSpec("fq", "higher", "FQ", unit="", doc="the p-value itself; see log10_fq"),
    MetricSpec(
        "log10_fq_300",
        "higher",
        "log10 FQ300",
        unit="",
        doc="log10_fq of the first 300 rows of the forget set, as LoKU's scripts compute it; empty "
        "where the forget set is smaller",
    ),
    MetricSpec("ks", "lower", "KS", unit="", doc="largest distance of the two distributions"),
    MetricSpec(
        "mu_likelihood",
        "higher",
        "MU6",
        unit="",
        doc="harmonic mean of MU's six values that need no generation: what tuning sees",
    ),
    *_odds("forget_odds_top", "forget odds, likelier half", "likelier half of the forget answers"),
    *_odds("forget_odds_rest", "forget odds, other half", "less likely half of the forget answers"),
    *_odds("retain_odds", "retain odds", "answers about retained authors"),
    *_odds("ra_odds", "ra odds", "answers about real authors"),
    *_odds("wf_odds", "wf odds", "answers about the world"),
    MetricSpec(
        "forget_log_ratio",
        "target",
        "forget log r",
        unit="nats per token",
        digits=2,
        doc="mean log truth ratio on the forget set: loss of the right answer less that of wrong "
        "ones",
    ),
    MetricSpec(
        "extraction_strength",
        "target",
        "ES",
        doc="share of a forget answer that follows by itself from its beginning",
    ),
    MetricSpec(
        "exact_memorization",
        "target",
        "EM",
        doc="share of forget answers' tokens that the argmax gets right, teacher forced",
    ),
    MetricSpec(
        "min_k_auc",
        "target",
        "Min-k AUC",
        doc="chance that a forget answer is likelier than a held-out one by its least likely "
        "tokens; 50 is no signal",
    ),
    MetricSpec(
        "privleak",
        "target",
        "PrivLeak",
        doc="relative change of 100 - Min-k AUC against Retrain: below 0 still known",
    ),
)


def _rates(prefix: str, where: str) -> tuple[MetricSpec, ...]:
    """Probability, ROUGE-L and truth ratio of one set."""
    kind = "forget" if prefix == "forget" else "other"
    what = {"forget": "mean min(r, 1/r)", "other": "mean max(0, 1 - r)"}[kind]
    options = ", among the wrong answers" if prefix in ("ra", "wf") else ""
    goal: Any = "target" if prefix in ("forget", "retain") else "higher"
    return (
        MetricSpec(
            f"{prefix}_prob", goal, f"{prefix} P", doc=f"mean answer probability on {where}"
            f"{options} (geometric mean over tokens)"
        ),
        MetricSpec(
            f"{prefix}_rouge", goal, f"{prefix} R-L", doc=f"ROUGE-L recall of greedy answers "
            f"on {where}"
        ),
        MetricSpec(
            f"{prefix}_truth_ratio", goal, f"{prefix} TR", doc=f"{what} on {where}, r = "
            "P(wrong) / P(right); or the right answer's share of the mass"
        ),
    )  # fmt: skip


METRICS: tuple[MetricSpec, ...] = (
    *_HEADLINES,
    *(spec for prefix, where in _SETS.items() for spec in _rates(prefix, where)),
    *_FURTHER,
)


def columns_of(scores: Mapping[str, Any]) -> dict[str, Columns]:
    """Part -> per-sample columns, of :class:`common.measure.scores.Scores` or of plain mappings."""
    return {part: getattr(value, "extra", value) for part, value in scores.items()}


def tofu_metrics(
    scores: Mapping[str, Any], *, style: Style = "clean", truth: Truth = "ratio"
) -> dict[str, float | None]:
    """Everything that one model's scores say, as far as the parts and columns are there.

    Args:
        scores: Part (values of :data:`PARTS`, ``holdout``) -> Scores or their extra columns.
        style: Conventions; see :mod:`language.metrics.truth`.
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
