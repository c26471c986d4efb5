"""Evaluation: one pass whose scores feed every metric.

The peer does what the scripts of the SalUn lineage do: a pass for accuracies, another one for what
the attack sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.data.batch import Batch, ordered_batches
from stable_forgetting.common.measure.scores import Scores, collect
from tools.perf.counts import counted
from tools.perf.measure import Case, Check, Size, Variant, ViTSize, make_vit


@dataclass(frozen=True)
class EvaluationSize:
    """A model, and samples per part; the parts of "full" have the proportions of CIFAR-10."""

    vit: ViTSize
    parts: dict[str, int]


EVALUATION_SIZES: dict[Size, EvaluationSize] = {
    "full": EvaluationSize(
        ViTSize(patch=8, dim=128, heads=4, batch=128),
        {"forget": 90, "retain": 810, "validation": 100, "test": 200},
    ),
    "quick": EvaluationSize(
        ViTSize(patch=8, dim=64, depth=2, heads=4, batch=64),
        {"forget": 45, "retain": 405, "validation": 50, "test": 100},
    ),
    "tiny": EvaluationSize(
        ViTSize(image=8, dim=16, depth=1, heads=2, batch=4),
        {"forget": 3, "retain": 11, "validation": 4, "test": 6},
    ),
}


class TensorSource:
    """Labelled tensors in memory (implements :class:`common.data.batch.Source`)."""

    digest = "random tensors"

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The samples at ``indices``; there is no augmentation."""
        return Batch({"x": self.images[indices]}, self.labels[indices], indices)


def one_pass(size: Size) -> Iterator[Case]:
    """All parts of one evaluation: accuracies of four parts, and what three sets tell an attack."""
    chosen = EVALUATION_SIZES[size]
    source, parts = _parts(chosen)
    model = make_vit(chosen.vit).eval()
    batch = chosen.vit.batch

    def ours() -> dict[str, Scores]:
        return {part: _scores(model, source, ids, batch) for part, ids in parts.items()}

    def naive() -> tuple[dict[str, float], dict[str, np.ndarray]]:
        accuracies = {part: _accuracy(model, source, ids, batch) for part, ids in parts.items()}
        seen = _attacked(parts)
        return accuracies, {n: _confidence(model, source, ids, batch) for n, ids in seen.items()}

    variants = [_evaluation_variant("ours, one pass", model, ours)]
    variants += [_evaluation_variant("a pass per metric", model, naive)]
    total = sum(chosen.parts.values())
    title = f"evaluation of {total} samples in {len(parts)} parts: {chosen.vit}"
    pairs = [("ours, one pass", "a pass per metric")]
    yield Case("evaluation", title, variants, pairs, _same_scores(ours(), *naive()))


def _parts(chosen: EvaluationSize) -> tuple[TensorSource, dict[str, np.ndarray]]:
    vit, total = chosen.vit, sum(chosen.parts.values())
    stream = generator(0, "perf", "evaluation")
    images = torch.randn(total, vit.channels, vit.image, vit.image, generator=stream)
    labels = torch.randint(0, vit.classes, (total,), generator=stream)
    ends = np.cumsum([*chosen.parts.values()])[:-1]
    split = np.split(np.arange(total, dtype=np.int64), ends)
    return TensorSource(images, labels), dict(zip(chosen.parts, split, strict=True))


def _attacked(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Members (the first |test| of retain), non-members and targets of the lineage's attack."""
    members = parts["retain"][: len(parts["test"])]
    return {"retain": members, "test": parts["test"], "forget": parts["forget"]}


def _scores(model: nn.Module, source: TensorSource, ids: np.ndarray, batch: int) -> Scores:
    return collect(lambda b: model(b.inputs["x"]), ordered_batches(source, ids, batch))


@torch.no_grad()
def _accuracy(model: nn.Module, source: TensorSource, ids: np.ndarray, batch: int) -> float:
    right = 0
    for chunk in ordered_batches(source, ids, batch):
        right += int((model(chunk.inputs["x"]).argmax(1) == chunk.labels).sum())
    return 100.0 * right / len(ids)


@torch.no_grad()
def _confidence(model: nn.Module, source: TensorSource, ids: np.ndarray, batch: int) -> np.ndarray:
    confidences = []
    for chunk in ordered_batches(source, ids, batch):
        probs = model(chunk.inputs["x"]).softmax(1)
        confidences.append(probs.gather(1, chunk.labels[:, None])[:, 0])
    return torch.cat(confidences).numpy()


def _evaluation_variant(name: str, model: nn.Module, run: Callable[[], object]) -> Variant:
    with counted(model) as seen:
        run()
    return Variant(name, run, {"forwards": seen.calls, "samples": seen.samples})


def _same_scores(
    ours: dict[str, Scores], accuracies: dict[str, float], confidences: dict[str, np.ndarray]
) -> list[Check]:
    gaps = [abs(ours[part].accuracy - value) for part, value in accuracies.items()]
    apart = [
        float(np.abs(ours[part].probability[: len(values)] - values).max())
        for part, values in confidences.items()
    ]
    return [
        Check("same accuracies (points)", max(gaps), 1e-9),
        Check("same confidences (largest difference)", max(apart), 1e-5),
    ]
