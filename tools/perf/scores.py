"""Evaluation in one pass, and the SVC attacks, beside what the scripts of the SalUn lineage do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from sklearn.svm import SVC
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.data.batch import Batch, ordered_batches
from stable_forgetting.common.measure.scores import Scores, collect
from stable_forgetting.common.membership.attacks import FEATURES, feature_matrix, svc_attack
from stable_forgetting.common.membership.svc import fit_low_rank, merged
from tools.perf.engine import logits_of
from tools.perf.timing import CLASSES, TINY, Case, ViTSize, forwards_of, make_vit

ONE, EACH = "ours, one pass", "a pass per metric"
OURS, PLAIN = "ours", "plain fits"
COST = 3.0
Parts = Mapping[str, np.ndarray]


class TensorSource:
    """Labelled tensors in memory (implements :class:`common.data.batch.Source`)."""

    digest = "random tensors"

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The samples at ``indices``; there is no augmentation."""
        return Batch({"x": self.images[indices]}, self.labels[indices], indices)


def one_pass(quick: bool) -> Iterator[Case]:
    """Accuracies of four parts, and what three sets give an attack, as CIFAR-10 is divided."""
    size = TINY if quick else ViTSize(patch=8, dim=128, heads=4, batch=128)
    counts = {"forget": 90, "retain": 810, "validation": 100, "test": 200}
    stream, total = generator(0, "perf", "evaluation"), sum(counts.values())
    images = torch.randn(total, size.channels, size.image, size.image, generator=stream)
    source = TensorSource(images, torch.randint(0, CLASSES, (total,), generator=stream))
    ends = np.cumsum([*counts.values()])[:-1]
    parts = dict(zip(counts, np.split(np.arange(total), ends), strict=True))
    model = make_vit(size).eval()

    def batches(ids: np.ndarray) -> Iterator[Batch]:
        return ordered_batches(source, ids, size.batch)

    def ours() -> dict[str, Scores]:
        return {
            part: collect(lambda b: logits_of(model, b), batches(ids))
            for part, ids in parts.items()
        }

    def naive() -> tuple[dict[str, float], dict[str, np.ndarray]]:
        members = parts["retain"][: len(parts["test"])]
        attacked = {"retain": members, "test": parts["test"], "forget": parts["forget"]}
        accuracies = {part: _accuracy(model, batches(ids)) for part, ids in parts.items()}
        return accuracies, {n: _confidence(model, batches(ids)) for n, ids in attacked.items()}

    runs = {ONE: ours, EACH: naive}
    seen = {}
    for name, run in runs.items():
        with forwards_of(model) as sizes:
            run()
        seen[name] = {"forwards": len(sizes), "samples": sum(sizes)}
    title = f"evaluation of {total} samples in {len(parts)} parts: {size}"
    checks = _same_scores(ours(), *naive())
    yield Case("evaluation", title, runs, [(ONE, EACH)], checks, seen)


@torch.no_grad()
def _accuracy(model: nn.Module, batches: Iterator[Batch]) -> float:
    hits = [logits_of(model, batch).argmax(1) == batch.labels for batch in batches]
    return 100.0 * float(torch.cat(hits).double().mean())


@torch.no_grad()
def _confidence(model: nn.Module, batches: Iterator[Batch]) -> np.ndarray:
    found = [
        logits_of(model, batch).softmax(1).gather(1, batch.labels[:, None])[:, 0]
        for batch in batches
    ]
    return torch.cat(found).numpy()


def _same_scores(
    ours: Mapping[str, Scores], accuracies: Mapping[str, float], confidences: Parts
) -> dict[str, tuple[float, float]]:
    gaps = [abs(ours[part].accuracy - value) for part, value in accuracies.items()]
    far = [
        float(np.abs(ours[part].probability[: len(values)] - values).max())
        for part, values in confidences.items()
    ]
    return {
        "same accuracies (points)": (max(gaps), 1e-9),
        "same confidences (largest difference)": (max(far), 1e-5),
    }


# The SVC attacks ---------------------------------------------------------------------------------


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
