"""MUSE's numbers from per-sample columns: one model's, and against Retrain.  Percent.

Source: Shi et al. 2024 (arXiv 2407.06460) and its repository; the conventions of style
``openunlearning`` are those of open-unlearning's evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from stable_forgetting.common.measure.goal import ConstantGoal, Goal, RetrainGoal
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.rules import Criterion, RuleSet
from stable_forgetting.language.metrics.limits import limited
from stable_forgetting.language.metrics.memorization import membership_auc, privacy_leakage

MuseStyle = Literal["muse", "openunlearning", "clean"]
Reference = Literal["retrain", "news", "books"]

PUBLISHED_AUC: Mapping[str, float] = {"news": 0.4772, "books": 0.5393}
"""Chance that a held-out text is likelier (Min-40 %) than one of the forget set under the retrained
LLaMA-2 7B: AUC_RETRAIN, forget_holdout_Min-40%, in constants.py of swj0419/muse_bench (fcd6651)."""

GAP_METRICS = ("verbmem", "knowmem_f", "knowmem_r", "min_k_auc")
"""The rates whose mean distance to Retrain orders a table."""
TRIAL_METRICS = ("forget_accuracy", "retain_accuracy")
"""What tuning sees: training text alone, no text of the metrics above."""


def _memorisation(*names: str) -> tuple[Goal, ...]:
    return tuple(RetrainGoal(name, inclusive=True) for name in names)


def _rule_set(name: str, source: str, *goals: Goal) -> RuleSet:
    numbers = ("C1", "C2", "C3", "C3'", "C4") if len(goals) == 5 else ("C1", "C2", "C3", "C4")
    return RuleSet(name, source, tuple(map(Criterion, numbers, goals)))


_BAND = "PrivLeak within 5 % of Retrain's"
RULE_SETS = (
    _rule_set(
        "muse",
        "Shi et al. 2024; it sets C4 no limit, so here it is Retrain's value",
        *_memorisation("verbmem", "knowmem_f"),
        ConstantGoal("privleak", -5.0, _BAND, reach="above", inclusive=True),
        ConstantGoal("privleak", 5.0, _BAND, inclusive=True),
        RetrainGoal("knowmem_r", reach="above", inclusive=True),
    ),
    _rule_set(
        "paper",
        "the paper's limits: 20.8, 33.1, 0 and 27.5 for MUSE-News on LLaMA-2 7B, where Retrain has"
        " 20.8, 33.1 and 55.0",
        *_memorisation("verbmem", "knowmem_f"),
        ConstantGoal("privleak", 0.0, "any over-unlearning passes", reach="above", inclusive=True),
        RetrainGoal("knowmem_r", reach="above", share=0.5, inclusive=True),
    ),
    _rule_set(
        "paper_news_7b",
        "the paper's limits as constants, for MUSE-News on LLaMA-2 7B alone",
        ConstantGoal("verbmem", 20.8, "Retrain in MUSE's table", inclusive=True),
        ConstantGoal("knowmem_f", 33.1, "Retrain in MUSE's table", inclusive=True),
        ConstantGoal("privleak", 0.0, "any over-unlearning passes", reach="above", inclusive=True),
        ConstantGoal("knowmem_r", 27.5, "half of MUSE's Retrain", reach="above", inclusive=True),
    ),
)

_SPECS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "verbmem",
        "target",
        "VerbMem",
        doc="ROUGE-L F1 of the 128 tokens that follow the beginning of a forgotten text",
    ),
    MetricSpec(
        "knowmem_f",
        "target",
        "KnowMem f",
        doc="ROUGE-L F1 of answers about forgotten text, after ten solved questions",
    ),
    MetricSpec(
        "knowmem_r",
        "target",
        "KnowMem r",
        doc="the same about retained text: utility",
    ),
    MetricSpec(
        "privleak",
        "target",
        "PrivLeak",
        doc="relative change of 100 - Min-k AUC against Retrain: -100 where every forgotten text "
        "is likelier than every held-out one; above 0 where it is conspicuously unlikely",
    ),
    MetricSpec(
        "min_k_auc",
        "target",
        "Min-k AUC",
        doc="chance that a forgotten text is likelier than a held-out one by the least likely 40 % "
        "of its tokens; 50 is no signal",
    ),
    MetricSpec(
        "extraction_strength",
        "target",
        "ES",
        doc="share of a VerbMem truth that follows by itself from its beginning",
    ),
    MetricSpec(
        "exact_memorization",
        "target",
        "EM",
        doc="share of a VerbMem truth's tokens that the argmax gets right, teacher forced",
    ),
    MetricSpec(
        "forget_accuracy",
        "target",
        "forget acc",
        doc="share of the forget chunks' tokens that the argmax gets right, teacher forced",
    ),
    MetricSpec(
        "retain_accuracy",
        "target",
        "retain acc",
        doc="the same of the retain chunks",
    ),
)
METRICS: tuple[MetricSpec, ...] = limited(_SPECS)
_COLUMNS = {
    "verbmem": ("verbmem", "rouge_l_f1"),
    "extraction_strength": ("verbmem", "extraction_strength"),
    "exact_memorization": ("verbmem", "exact_memorization"),
    "knowmem_f": ("knowmem_forget", "rouge_l_f1"),
    "knowmem_r": ("knowmem_retain", "rouge_l_f1"),
}
"""Metric -> (part, column) whose mean it is."""


def muse_metrics(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """Everything that one model's scores say; None where a part is absent."""
    metrics: dict[str, float | None] = {}
    for name, (part, column) in _COLUMNS.items():
        values = scores[part].extra[column] if part in scores else None
        metrics[name] = None if values is None else 100.0 * float(np.mean(values))
    for part in ("forget", "retain"):
        metrics[f"{part}_accuracy"] = scores[part].accuracy if part in scores else None
    auc = _auc(scores)
    metrics["min_k_auc"] = None if auc is None else 100.0 * auc
    return metrics


def _auc(scores: Mapping[str, Any]) -> float | None:
    sets = [scores.get(f"privleak_{name}") for name in ("forget", "holdout")]
    if None in sets:
        return None
    members, others = (part.extra["min_k"] for part in sets if part is not None)
    return membership_auc(members, others)


def muse_compare(
    scores: Mapping[str, Any],
    retrain: Mapping[str, Any],
    *,
    style: MuseStyle = "muse",
    reference: Reference = "retrain",
) -> dict[str, float | None]:
    """PrivLeak of a model.

    Args:
        scores: Its own.
        retrain: The retrained model's, on the same parts.
        style: ``openunlearning`` adds 1e-10 to the denominator.
        reference: Whose AUC it is relative to: the measured ``retrain``, or one of
            :data:`PUBLISHED_AUC`.
    """
    auc = _auc(scores)
    base = _auc(retrain) if reference == "retrain" else 1 - PUBLISHED_AUC[reference]
    if auc is None or base is None:
        return {"privleak": None}
    epsilon = 1e-10 if style == "openunlearning" else 0.0
    return {"privleak": privacy_leakage(auc, base, epsilon=epsilon)}
