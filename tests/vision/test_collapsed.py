"""What docs/metrics.md says that a collapsed image model scores, held against one."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
import torch

from stable_forgetting.common.membership.attacks import DRAWS
from stable_forgetting.vision.benchmark import VisionBenchmark
from stable_forgetting.vision.metrics import ACCURACIES, METRICS
from tests.vision.test_protocols import Knows, make

CLASSES = 10
SCENARIOS = ({"kind": "class", "num_classes": 1}, {"kind": "random", "fraction": 0.2})


class Collapsed:
    """Scores of a model that gives one answer: sure of a class, or unsure (``height`` 0)."""

    def __init__(self, scenario, *, own: bool, height: float):
        benchmark = make(scenario=scenario)
        split = benchmark.split(1)
        labels = benchmark.source.labels
        gone = int(labels[split.parts["forget"][0]])
        self.one = (gone if own else (gone + 1) % CLASSES) if height else 0
        self.sure, self.own = height > 0, own and scenario["kind"] == "class" and height > 0
        logits = torch.zeros(CLASSES)
        logits[self.one] = height
        model, parts = Knows(logits), benchmark.parts(split, trial=False, seed=1)
        scores = {name: benchmark.collect(model, ids) for name, ids in parts.items()}
        self.values = benchmark.evaluate(scores, trial=False, seed=1)
        self.shares = {
            name: 100 * float(np.mean(labels[parts[part]] == self.one))
            for name, part in ACCURACIES.items()
            if part in parts
        }
        self.shares["test_loss"], self.shares["forget_loss"] = self.shares["ta"], self.shares["fa"]


def share(world, name, value):
    return value == pytest.approx(world.shares[name], abs=1e-4)


def of_an_attack(world, name, value):
    """Each draw of the attack calls all of the forget set, one class of it, or the others."""
    edges = (0, 100, world.shares["fa"], 100 - world.shares["fa"])
    if name == "mia_logistic":
        edges += (50,)
    means = (fmean(draws) for draws in itertools.combinations_with_replacement(edges, DRAWS))
    return any(value == pytest.approx(mean, abs=1e-4) for mean in (*edges, *means))


def ranked(world, name, value):
    if world.own:
        return value == pytest.approx(100)
    return abs(value - 50) < (8 if world.sure else 1e-6)


def tied(world, name, value):
    return value is None or value == pytest.approx(100 if world.own else 0, abs=5)


def loss(world, name, value):
    if not world.sure:
        return value == pytest.approx(math.log(CLASSES), abs=1e-5)
    return value == pytest.approx(20 * (1 - world.shares[name] / 100), abs=1e-3)


CLAIMS = {
    "the share of its one class in it: in class forgetting 0, or 100 where that is the forgotten "
    "one": share,
    "the share of its one class: 100 / classes where classes are balanced": share,
    "0, or 100 where its one class is the forgotten one": share,
    "as TA": share,
    "100 less its FA": lambda w, name, v: v == pytest.approx(100 - w.values["fa"]),
    "0, 100 or a class's share, or a mean of these over draws: its scores differ by class "
    "alone": of_an_attack,
    "50, or where classes differ as MIA": of_an_attack,
    "as MIA": of_an_attack,
    "50": lambda w, name, v: abs(v - 50) < (3 if not w.own else 5),
    "50 where all its losses are alike, 100 where its one class is the forgotten one, else near "
    "50": ranked,
    "about 0, as ties are no signal, or 100 where its one class is the forgotten one": tied,
    "as TPR@1%": tied,
    "ln(classes) where it is unsure; where it is sure far more, but 0 on its one class": loss,
}
"""What the document says -> whether a measured value is so."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=["class", "random"])
@pytest.mark.parametrize(
    ("own", "height"), [(False, 0.0), (False, 20.0), (True, 20.0)], ids=["unsure", "sure", "own"]
)
def test_a_collapsed_model_scores_what_is_said(scenario, own, height):
    world = Collapsed(scenario, own=own, height=height)
    wrong = {
        spec.name: (spec.collapsed, world.values[spec.name])
        for spec in METRICS
        if spec.name in world.values
        and not CLAIMS[spec.collapsed](world, spec.name, world.values[spec.name])
    }
    assert wrong == {}
    absent = {spec.name for spec in METRICS} - set(world.values)
    assert absent <= {"ta_f", *VisionBenchmark.answer_metrics}
