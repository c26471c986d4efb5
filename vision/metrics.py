"""What the vision arm measures on one model, in percent unless said.

The goal of almost every number is the retrained model's value, not 0 or 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.measure.metric import GapRule, MetricSpec

if TYPE_CHECKING:
    from common.measure.scores import Scores

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("fa", "reference", "FA", doc="accuracy on the forget set (training images)"),
    MetricSpec("ua", "reference", "UA", doc="100 - FA: the forget set's error"),
    MetricSpec("ra", "reference", "RA", doc="accuracy on the retain set (training images)"),
    MetricSpec("ta", "reference", "TA", doc="test accuracy (retained classes when classes go)"),
    MetricSpec("ta_f", "reference", "TA_f", doc="test accuracy on the forgotten classes"),
    MetricSpec("va", "reference", "VA", doc="validation accuracy: what tuning sees instead of TA"),
    MetricSpec(
        "mia",
        "reference",
        "MIA",
        doc="share of the forget set that an RBF SVC on the "
        "true-class probability calls NON-member (MIA efficacy of the SalUn lineage)",
    ),
    MetricSpec("mia_validation", "reference", "MIA_v", doc="MIA with validation as non-members"),
    MetricSpec("mia_correctness", "reference", "MIA corr.", doc="the same on correctness"),
    MetricSpec("mia_entropy", "reference", "MIA ent.", doc="the same on the entropy"),
    MetricSpec(
        "mia_modified_entropy",
        "reference",
        "MIA m-ent.",
        doc="the same on the modified entropy (Song & Mittal), computed correctly",
    ),
    MetricSpec("mia_probs", "reference", "MIA prob", doc="the same on the whole softmax"),
    MetricSpec(
        "mia_logistic",
        "reference",
        "MIA log.",
        doc="logistic regression on one monotone feature; 50 when its sign is wrong",
    ),
    MetricSpec(
        "mia_bacc",
        "reference",
        "SVC b.acc",
        doc="balanced accuracy of the MIA's SVC on "
        "the data it was fitted on: near 50 it measures threshold noise",
    ),
    MetricSpec("mia_auc", "reference", "AUC", doc="forget against test by loss; 50 is no signal"),
    MetricSpec("mia_tpr_1", "reference", "TPR@1%", doc="true positives at 1 % false positives"),
    MetricSpec(
        "mia_tpr_01", "reference", "TPR@0.1%", doc="true positives at 0.1 % false positives"
    ),
    MetricSpec(
        "mia_threshold_bacc",
        "reference",
        "loss b.acc",
        doc="balanced accuracy of the best loss threshold (in sample)",
    ),
    MetricSpec(
        "forget_loss",
        "reference",
        "forget loss",
        unit="nats",
        doc="mean cross-entropy on the forget set",
    ),
    MetricSpec(
        "test_loss", "reference", "test loss", unit="nats", doc="mean cross-entropy on test"
    ),
)

GAP = GapRule(
    metrics=("ua", "ra", "ta", "mia"),
    trial=("ua", "ra", "va", "mia_validation"),
    columns=("fa", "ra", "ta", "mia"),
    title="AG4",
    words="AG4 = mean |gap| over UA, RA, TA, MIA; AG2 over TA, MIA.",
    compact=("fa", "ua", "ra", "ta", "mia"),
    also=("ag2", "max_gap", "tow", "tow_mia"),
)

ACCURACIES = {
    "fa": "forget",
    "ra": "retain",
    "ta": "test",
    "ta_f": "test_forget",
    "va": "validation",
}


def vision_metrics(
    scores: Mapping[str, Scores], *, trial: bool, seed: int, features: Sequence[str]
) -> dict[str, float | None]:
    """All metrics that the scored parts allow.

    Args:
        scores: Part -> scores; a trial has no test parts.
        trial: Only what tuning needs: no test data, one attack.
        seed: Of the attacks' draws.
        features: SVC features.

    Raises:
        Diverged: A score is not finite.
    """
    from common.membership.attacks import membership_metrics

    for part in scores.values():
        part.check_finite()
    metrics: dict[str, float | None] = {
        name: scores[part].accuracy for name, part in ACCURACIES.items() if part in scores
    }
    metrics["ua"] = 100.0 - (metrics["fa"] or 0.0)
    metrics["forget_loss"] = float(scores["forget"].loss.mean(dtype="float64"))
    if "validation" in scores:
        held_out = membership_metrics(
            scores, seed=seed, holdout="validation", features=("confidence",)
        )
        metrics["mia_validation"] = held_out["mia"]
    if not trial:
        metrics["test_loss"] = float(scores["test"].loss.mean(dtype="float64"))
        metrics |= membership_metrics(scores, seed=seed, features=features)
    return metrics
