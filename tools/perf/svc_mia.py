"""The SVC attacks of the SalUn lineage on five features, against scikit-learn as its code asks it.

The peer fits one support vector machine per feature on all samples as they come; ours is
:mod:`common.membership.svc`.  Both get the same scores, so what differs is how the optimum is
found.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.measure.scores import Scores, collect
from stable_forgetting.common.membership.attacks import FEATURES, feature_matrix, svc_attack
from stable_forgetting.common.membership.svc import fit_low_rank, merged
from tools.perf.measure import Case, Check, Size, Variant

POINTS = 0.1
"""Largest difference of an efficacy that passes, in percentage points."""
GOAL = 0.1
CLASSES, COST = 10, 3.0
OURS, PLAIN = "ours", "plain fits"
SIZES: dict[Size, tuple[int, int]] = {
    "full": (5000, 1000),
    "quick": (1000, 1000),
    "tiny": (60, 20),
}
"""Members (as many non-members), and targets."""

Parts = tuple[Scores, Scores, Scores]


def attacks(size: Size) -> Iterator[Case]:
    """All five fits and their decisions on the targets; ours gives balanced accuracies too."""
    count, targets = SIZES[size]
    parts = (
        _scores(count, 12.0, 4.0, "members"),
        _scores(count, 8.0, 5.0, "nonmembers"),
        _scores(targets, 10.0, 4.0, "targets"),
    )

    def ours() -> dict[str, float]:
        return {feature: svc_attack(*parts, feature).efficacy for feature in FEATURES}

    def plain() -> dict[str, float]:
        return {feature: _plain_efficacy(parts, feature) for feature in FEATURES}

    total = 2 * count
    yield Case(
        "svc_mia",
        f"SVC attack on {total:,} samples, {targets:,} targets, {len(FEATURES)} features",
        [
            Variant(OURS, ours, {"samples to libsvm": _left_to_libsvm(parts)}),
            Variant(PLAIN, plain, {"samples to libsvm": total * len(FEATURES)}),
        ],
        [(OURS, PLAIN)],
        _same_efficacies(ours(), plain()),
        goals={(OURS, PLAIN): GOAL},
    )


def _scores(count: int, mean: float, std: float, name: str) -> Scores:
    """Scores of normal logits, the true one raised by a normal amount; float32, as models give."""
    stream = generator(0, "perf", "svc_mia", name)
    labels = torch.arange(count) % CLASSES
    logits = 1.5 * torch.randn(count, CLASSES, generator=stream)
    logits[torch.arange(count), labels] += mean + std * torch.randn(count, generator=stream)
    batch = Batch({"x": logits}, labels, torch.arange(count))
    return collect(lambda b: b.inputs["x"], [batch])


def _plain_efficacy(parts: Parts, feature: str) -> float:
    from sklearn.svm import SVC

    members, nonmembers, targets = (feature_matrix(part, feature) for part in parts)
    labels = np.repeat([1, 0], [len(members), len(nonmembers)])
    classifier = SVC(C=COST, gamma="auto", kernel="rbf")
    classifier.fit(np.concatenate([members, nonmembers]), labels)
    return 100.0 * float(np.mean(classifier.predict(targets) == 0))


def _left_to_libsvm(parts: Parts) -> int:
    """Distinct samples of the features whose fit ours does not do itself."""
    members, nonmembers, _ = parts
    problems = [
        merged(feature_matrix(members, name), feature_matrix(nonmembers, name), cost=COST)
        for name in FEATURES
    ]
    return sum(len(problem.signs) for problem in problems if fit_low_rank(problem) is None)


def _same_efficacies(ours: dict[str, float], plain: dict[str, float]) -> list[Check]:
    return [
        Check(f"same efficacy, {name} (points)", abs(ours[name] - plain[name]), POINTS)
        for name in FEATURES
    ]
