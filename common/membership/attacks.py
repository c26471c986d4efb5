"""Membership attacks on collected scores: does the model still know that it saw the forget set?

Efficacy is the share of the forget set that an attack calls NON-member, in percent.  More is not
better: the goal is the efficacy measured on the retrained model.  An attack whose balanced
accuracy on its own attack set is near 50 % measures threshold noise, so that number is always
reported beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.splits import balanced_draw
from stable_forgetting.common.measure.scores import Scores, auc

FEATURES = ("confidence", "correctness", "entropy", "modified_entropy", "probs")
"""What an SVC attack may look at; the published "MIA" is ``confidence``."""

DRAWS = 10
"""How often members and non-members are drawn where one side has more of them than the other."""
MARGIN_CLIP = 15.0
_ATTRIBUTES = {"confidence": "probability", "correctness": "correct"}


class Fitted(NamedTuple):
    """Outcome of an attack that was fitted on members and non-members, in percent.

    Attributes:
        efficacy: Share of targets called non-member.
        balanced_accuracy: On the very members and non-members it was fitted on: an optimistic
            figure that says whether there was any signal at all (50 is none).
    """

    efficacy: float
    balanced_accuracy: float


CHANCE = Fitted(50.0, 50.0)


def feature_matrix(scores: Scores, feature: str) -> np.ndarray:
    """(N, d) float64 of one of :data:`FEATURES`; d = 1 except for ``probs`` (d = C).

    Raises:
        ConfigError: No such feature.
        DataError: The scores hold no ``probs``.
        Diverged: A value is not finite.
    """
    if feature not in FEATURES:
        hint = did_you_mean(feature, FEATURES)
        raise ConfigError(f"unknown membership feature '{feature}'{hint}")
    scores.check_finite()
    values = getattr(scores, _ATTRIBUTES.get(feature, feature))
    if values is None:
        raise DataError("feature 'probs' needs scores that keep the softmax")
    return np.asarray(values, dtype=np.float64).reshape(len(scores), -1)


def svc_attack(
    members: Scores, nonmembers: Scores, targets: Scores, feature: str = "confidence"
) -> Fitted:
    """The SVC attack of SalUn's lineage: RBF kernel, C = 3, gamma = 1 / d, no scaling.

    The optimum is that of scikit-learn's fit; how it is found is :mod:`common.membership.svc`'s.
    """
    from stable_forgetting.common.membership.svc import fit_svc

    inside, outside = feature_matrix(members, feature), feature_matrix(nonmembers, feature)
    is_member = fit_svc(inside, outside)
    return _result(
        is_member(inside), is_member(outside), is_member(feature_matrix(targets, feature))
    )


def _result(inside: np.ndarray, outside: np.ndarray, targets: np.ndarray) -> Fitted:
    """From the boolean "called member" of members, non-members and targets."""
    balanced = 50.0 * float(np.mean(inside) + np.mean(~outside))
    return Fitted(100.0 * float(np.mean(~targets)), balanced)


def logistic_attack(members: Scores, nonmembers: Scores, targets: Scores) -> Fitted:
    """Logistic regression on one monotone feature: the clipped margin, standardised.

    Two collinear features extrapolate the wrong way on a destroyed model (a forget set with a loss
    of 11 is then called member), and so does one feature whose coefficient came out negative.
    There, and where the feature is constant, the answer is :data:`CHANCE`.
    """
    from sklearn.linear_model import LogisticRegression

    parts = [_clipped_margin(part) for part in (members, nonmembers, targets)]
    fitted = np.concatenate(parts[:2])
    labels = np.repeat([1, 0], [len(members), len(nonmembers)])
    center, spread = fitted.mean(), fitted.std()
    if spread == 0:
        return CHANCE
    model = LogisticRegression().fit(((fitted - center) / spread)[:, None], labels)
    if model.coef_[0, 0] <= 0:
        return CHANCE
    return _result(*(model.predict(((part - center) / spread)[:, None]) == 1 for part in parts))


def _clipped_margin(scores: Scores) -> np.ndarray:
    scores.check_finite()
    return np.clip(scores.margin.astype(np.float64), -MARGIN_CLIP, MARGIN_CLIP)


def loss_threshold_attack(
    forget_loss: np.ndarray, test_loss: np.ndarray
) -> dict[str, float | None]:
    """Calls a sample a member if its loss is low (Yeom et al., 2018), over all thresholds.

    Args:
        forget_loss: (N,) losses of the forget set.
        test_loss: (M,) losses of samples never trained on.

    Returns:
        In percent: ``mia_auc``, the chance that a forget sample has the lower loss, ties counted
        half (50 is ideal only if both sides are equally hard); ``mia_tpr_1`` and ``mia_tpr_01``,
        the true-positive rate at 1 and .1 % false positives, None below 100 and 1000 non-members;
        ``mia_threshold_bacc``, of the best threshold, chosen in-sample: at least 50.
    """
    positives = np.sort(np.asarray(forget_loss, dtype=np.float64))
    negatives = np.sort(np.asarray(test_loss, dtype=np.float64))
    assert len(positives) and len(negatives), "both sides need samples"
    assert np.isfinite(positives).all() and np.isfinite(negatives).all(), "losses must be finite"
    upto = np.searchsorted(negatives, positives, side="right")
    tpr = np.arange(1, len(positives) + 1) / len(positives)
    best = max(0.0, float(np.max(tpr - upto / len(negatives))))
    return {
        "mia_auc": auc(-positives, -negatives),
        "mia_tpr_1": _tpr_at(positives, negatives, per_mille=10),
        "mia_tpr_01": _tpr_at(positives, negatives, per_mille=1),
        "mia_threshold_bacc": 50.0 + 50.0 * best,
    }


def _tpr_at(positives: np.ndarray, negatives: np.ndarray, *, per_mille: int) -> float | None:
    """Highest TPR (percent) with at most ``per_mille`` / 1000 of the negatives called member."""
    allowed = len(negatives) * per_mille // 1000
    if allowed == 0:
        return None
    return 100.0 * float(np.mean(positives < negatives[allowed]))


def membership_metrics(
    targets: Scores,
    trained: Scores,
    unseen: Scores,
    *,
    seed: int,
    features: Sequence[str] = FEATURES,
) -> dict[str, float | None]:
    """All membership metrics of one model, in percent.

    Members are a class-balanced draw of ``trained``, non-members one of ``unseen``, both as large
    as the smaller of the two.  Where that leaves some out, attacks that are fitted are fitted on
    :data:`DRAWS` draws, and their numbers are means: one draw moves the SVC's by several points.

    Returns:
        ``mia`` and ``mia_bacc`` (confidence), ``mia_<feature>`` for the others, ``mia_logistic``,
        ``mia_auc``, ``mia_tpr_1``, ``mia_tpr_01``, ``mia_threshold_bacc``.  Features that were not
        asked for have no key; None stands for what these scores cannot give (``mia_probs`` without
        probs, a TPR below the resolution of ``unseen``).

    Raises:
        ConfigError: A feature is unknown.
        Diverged: A score is not finite.
    """
    for scores in (targets, trained, unseen):
        scores.check_finite()
    count = min(len(trained), len(unseen))
    draws = range(1 if len(trained) == len(unseen) else DRAWS)
    sides = [
        (_draw(trained, count, seed, "members", k), _draw(unseen, count, seed, "nonmembers", k))
        for k in draws
    ]
    metrics: dict[str, float | None] = {}
    for feature in features:
        if feature == "probs" and trained.probs is None:
            metrics["mia_probs"] = None
            continue
        results = [svc_attack(*pair, targets, feature) for pair in sides]
        name = "mia" if feature == "confidence" else f"mia_{feature}"
        metrics[name] = fmean(result.efficacy for result in results)
        if feature == "confidence":
            metrics["mia_bacc"] = fmean(result.balanced_accuracy for result in results)
    metrics["mia_logistic"] = fmean(logistic_attack(*pair, targets).efficacy for pair in sides)
    return metrics | loss_threshold_attack(targets.loss, unseen.loss)


def _draw(scores: Scores, count: int, seed: int, name: str, number: int) -> Scores:
    """``count`` samples, even over classes where there are classes; the ``number``-th draw."""
    if count == len(scores):
        return scores
    positions, stream = np.arange(len(scores)), (name, number) if number else (name,)
    if scores.labels is None:
        chosen = np.sort(hash_order(positions, seed, "mia", *stream)[:count])
    else:
        chosen = balanced_draw(positions, scores.labels, count, seed, "mia", *stream)
    return scores.select(chosen)
