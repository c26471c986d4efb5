"""The vision benchmark: what is hashed, what is scored, what is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stable_forgetting.common.base.config import digest, validate
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.vision.benchmark import VisionBenchmark
from stable_forgetting.vision.config import VisionConfig
from stable_forgetting.vision.metrics import METRICS

TINY = {
    "data": {"name": "digits", "train_images": 200, "validation_images": 60, "test_images": 100},
    "model": {"name": "scratch", "dim": 16, "depth": 1, "heads": 2},
    "train": {"epochs": 1},
}


def make(**changes: object) -> VisionBenchmark:
    return VisionBenchmark(validate(VisionConfig, {**TINY, **changes}, "test"), Runtime())


@pytest.fixture(scope="module")
def by_class() -> VisionBenchmark:
    return make(scenario={"kind": "class", "num_classes": 1})


def test_original_does_not_depend_on_the_scenario(by_class: VisionBenchmark) -> None:
    by_chance = make(scenario={"kind": "random", "fraction": 0.1})
    same = [digest(b.identity(b.config, "train")) for b in (by_class, by_chance)]
    other = [digest(b.identity(b.config, "split")) for b in (by_class, by_chance)]
    assert same[0] == same[1]
    assert other[0] != other[1]
    np.testing.assert_array_equal(by_class.split(1).train, by_chance.split(1).train)


def test_a_trial_scores_no_test_image(by_class: VisionBenchmark) -> None:
    split = by_class.split(1)
    trial = by_class.parts(split, trial=True, seed=1)
    final = by_class.parts(split, trial=False, seed=1)
    test_images = set(by_class.source.test_pool.tolist())
    assert not test_images & {int(i) for ids in trial.values() for i in ids}
    assert {"test", "test_forget"} <= set(final)


def test_retain_is_subsampled_if_asked() -> None:
    small = make(evaluation={"retain_samples": 50})
    split = small.split(1)
    parts = small.parts(split, trial=False, seed=1)
    assert len(parts["retain"]) == 50
    assert set(parts["retain"].tolist()) <= set(split.parts["retain"].tolist())
    np.testing.assert_array_equal(
        parts["retain"], small.parts(split, trial=False, seed=1)["retain"]
    )


class Knows(nn.Module):
    """Predicts a fixed class per image position, without looking at pixels."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(x), -1)


def test_every_final_metric_is_declared_and_every_declared_one_is_measured(
    by_class: VisionBenchmark,
) -> None:
    split = by_class.split(1)
    model = by_class.build(1)
    scores = {
        name: by_class.collect(model, ids)
        for name, ids in by_class.parts(split, trial=False, seed=1).items()
    }
    metrics = by_class.evaluate(scores, trial=False, seed=1)
    compared = by_class.compare(by_class.config, scores, scores)
    assert metrics.keys() | compared.keys() == {spec.name for spec in METRICS}
    assert set(compared.values()) == {0.0}, "a model answers as it does itself"
    trial = by_class.evaluate(
        {k: v for k, v in scores.items() if not k.startswith("test")}, trial=True, seed=1
    )
    assert {"ua", "ra", "va", "mia_validation"} <= set(trial)
    assert "ta" not in trial and "mia" not in trial
