"""What the vision arm measures on one model, in percent unless said.

The target of almost every number is the retrained model's value, not 0 or 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.base.errors import ConfigError
from common.measure.metric import MAX_GAP, GapColumn, MapAxes, MetricSpec
from common.measure.rules import GapRule

if TYPE_CHECKING:
    from common.measure.scores import Scores

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("fa", "target", "FA", doc="accuracy on the forget set (training images)"),
    MetricSpec("ua", "target", "UA", doc="100 - FA: the forget set's error"),
    MetricSpec("ra", "target", "RA", doc="accuracy on the retain set (training images)"),
    MetricSpec("ta", "target", "TA", doc="test accuracy (retained classes when classes go)"),
    MetricSpec("ta_f", "target", "TA_f", doc="test accuracy on the forgotten classes"),
    MetricSpec("va", "target", "VA", doc="validation accuracy: what tuning sees instead of TA"),
    MetricSpec(
        "mia",
        "target",
        "MIA",
        doc="share of the forget set that an RBF SVC on the "
        "true-class probability calls NON-member (MIA efficacy of the SalUn lineage)",
    ),
    MetricSpec("mia_validation", "target", "MIA_v", doc="MIA with validation as non-members"),
    MetricSpec("mia_correctness", "target", "MIA corr.", doc="the same on correctness"),
    MetricSpec("mia_entropy", "target", "MIA ent.", doc="the same on the entropy"),
    MetricSpec(
        "mia_modified_entropy",
        "target",
        "MIA m-ent.",
        doc="the same on the modified entropy (Song & Mittal), computed correctly",
    ),
    MetricSpec("mia_probs", "target", "MIA prob", doc="the same on the whole softmax"),
    MetricSpec(
        "mia_logistic",
        "target",
        "MIA log.",
        doc="logistic regression on one monotone feature; 50 when its sign is wrong",
    ),
    MetricSpec(
        "mia_bacc",
        "target",
        "SVC b.acc",
        doc="balanced accuracy of the MIA's SVC on "
        "the data it was fitted on: near 50 it measures threshold noise",
        calibration="Balanced accuracy of the MIA's SVC on Retrain's own data: {} % (50: no "
        "signal, the MIA column is then threshold noise).",
    ),
    MetricSpec("mia_auc", "target", "AUC", doc="forget against test by loss; 50 is no signal"),
    MetricSpec("mia_tpr_1", "target", "TPR@1%", doc="true positives at 1 % false positives"),
    MetricSpec("mia_tpr_01", "target", "TPR@0.1%", doc="true positives at 0.1 % false positives"),
    MetricSpec(
        "mia_threshold_bacc",
        "target",
        "loss b.acc",
        doc="balanced accuracy of the best loss threshold (in sample)",
    ),
    MetricSpec(
        "forget_loss",
        "target",
        "forget loss",
        unit="nats",
        doc="mean cross-entropy on the forget set",
        digits=2,
    ),
    MetricSpec("test_loss", "target", "test loss", unit="nats", doc="mean cross-entropy on test"),
)

GAP = GapRule(
    metrics=("ua", "ra", "ta", "mia"),
    trial=("ua", "ra", "va", "mia_validation"),
    columns=("fa", "ra", "ta", "mia"),
    title="AG4",
    words="AG4 = mean |gap| over UA, RA, TA, MIA; AG2 over TA, MIA.",
    compact=("fa", "ua", "ra", "ta", "mia"),
    also=(
        GapColumn("ag2", "AG2 ↓", "mean", ("ta", "mia"), digits=2),
        MAX_GAP,
        GapColumn("tow", "ToW ↑", "tow", ("fa", "ra", "ta"), digits=3),
        GapColumn("tow_mia", "ToW-MIA ↑", "tow", ("mia", "ra", "ta"), digits=3),
    ),
)
"""AG is that of SalUn (Fan et al., 2024); in AG2 accuracies do not outvote the attack."""

MAP_AXES = MapAxes(
    forgotten="fa",
    retained="ra",
    utility="ta",
    tolerances=(5.0, 1.0, 2.0),
    also=("forget_loss",),
    parts=("forget", "retain", "test"),
)

ACCURACIES = {
    "fa": "forget",
    "ra": "retain",
    "ta": "test",
    "ta_f": "test_forget",
    "va": "validation",
}


def accuracy_metrics(scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """Accuracies of the parts that were scored, in percent, and the forget loss in nats.

    Raises:
        Diverged: A score is not finite.
    """
    for part in scores.values():
        part.check_finite()
    metrics: dict[str, float | None] = {
        name: scores[part].accuracy for name, part in ACCURACIES.items() if part in scores
    }
    metrics["forget_loss"] = float(scores["forget"].loss.mean(dtype="float64"))
    return metrics


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
        ConfigError: A part that the metrics need was not scored.
        Diverged: A score is not finite.
    """
    from common.membership.attacks import membership_metrics

    for needed in ("forget", "retain", *(() if trial else ("test",))):
        if needed not in scores:
            raise ConfigError(f"vision metrics need the part '{needed}'; score it too")
    metrics = accuracy_metrics(scores)
    metrics["ua"] = 100.0 - (metrics["fa"] or 0.0)
    sides = scores["forget"], scores["retain"]
    if "validation" in scores:
        by_confidence = membership_metrics(
            *sides, scores["validation"], seed=seed, features=("confidence",)
        )
        metrics["mia_validation"] = by_confidence["mia"]
    if not trial:
        metrics["test_loss"] = float(scores["test"].loss.mean(dtype="float64"))
        metrics |= membership_metrics(*sides, scores["test"], seed=seed, features=features)
    return metrics
