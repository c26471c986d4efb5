"""The SVC attacks beside plain scikit-learn fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from sklearn.svm import SVC

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.measure.scores import Scores, collect
from stable_forgetting.common.membership.attacks import FEATURES, feature_matrix, svc_attack
from stable_forgetting.common.membership.svc import fit_low_rank, merged
from tools.perf.timing import CLASSES, Case

OURS, PLAIN = "ours", "plain fits"
COST = 3.0


def attacks(quick: bool) -> Iterator[Case]:
    """Fits on five features and their decisions; the peer fits all samples with scikit-learn."""
    count, targets = (60, 20) if quick else (5000, 1000)
    parts = (
        _scores(count, 12.0, 4.0, "members"),
        _scores(count, 8.0, 5.0, "nonmembers"),
        _scores(targets, 10.0, 4.0, "targets"),
    )

    def ours() -> dict[str, float]:
        return {feature: svc_attack(*parts, feature).efficacy for feature in FEATURES}

    def plain() -> dict[str, float]:
        return {feature: _plain_efficacy(parts, feature) for feature in FEATURES}

    found, expected = ours(), plain()
    checks = {
        f"same efficacy, {name} (points)": (abs(found[name] - expected[name]), 0.1)
        for name in FEATURES
    }
    left = {OURS: _left_to_libsvm(parts), PLAIN: 2 * count * len(FEATURES)}
    counts = {name: {"samples to libsvm": value} for name, value in left.items()}
    title = f"SVC attack on {2 * count:,} samples, {targets:,} targets, {len(FEATURES)} features"
    runs, pair = {OURS: ours, PLAIN: plain}, (OURS, PLAIN)
    yield Case("svc_mia", title, runs, [pair], checks, counts, goals={pair: 0.1})


def _scores(count: int, mean: float, std: float, name: str) -> Scores:
    """Scores of normal logits, the true one raised by a normal amount; float32, as models give."""
    stream = generator(0, "perf", "svc_mia", name)
    labels = torch.arange(count) % CLASSES
    logits = 1.5 * torch.randn(count, CLASSES, generator=stream)
    logits[torch.arange(count), labels] += mean + std * torch.randn(count, generator=stream)
    return collect(lambda b: b.inputs["x"], [Batch({"x": logits}, labels, torch.arange(count))])


def _plain_efficacy(parts: Sequence[Scores], feature: str) -> float:
    members, nonmembers, targets = (feature_matrix(part, feature) for part in parts)
    labels = np.repeat([1, 0], [len(members), len(nonmembers)])
    classifier = SVC(C=COST, gamma="auto", kernel="rbf")
    classifier.fit(np.concatenate([members, nonmembers]), labels)
    return 100.0 * float(np.mean(classifier.predict(targets) == 0))


def _left_to_libsvm(parts: Sequence[Scores]) -> int:
    """Distinct samples of the features whose fit ours does not do itself."""
    pairs = [[feature_matrix(part, name) for part in parts[:2]] for name in FEATURES]
    problems = [merged(*pair) for pair in pairs]
    return sum(len(problem.signs) for problem in problems if fit_low_rank(problem) is None)
