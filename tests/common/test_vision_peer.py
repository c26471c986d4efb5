"""Losses, masks and noise of classifiers' methods as published; see tests/golden/vision_peer.md."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.methods.tools.objectives import (
    AlternatingAscent,
    Scrubbing,
    ToNeighbours,
    TwoTeachers,
    _Noise,
    _Repel,
)
from stable_forgetting.common.methods.tools.passes import summed_gradients
from stable_forgetting.common.methods.tools.streams import members_of
from stable_forgetting.common.methods.tools.weights import top_share
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.optimizer import make_optimizer

GOLDEN = Path(__file__).parents[1] / "golden"
PEER = json.loads((GOLDEN / "vision_peer.json").read_text(encoding="utf-8"))
_spec = importlib.util.spec_from_file_location("vision_cases", GOLDEN / "make_vision_peer.py")
MADE = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(MADE)
EVERYONE = torch.arange(MADE.ROWS)
FORGOTTEN = MADE.FORGOTTEN.nonzero().squeeze(1)


def logits_of(phase):
    """A model that answers a batch by its indices."""
    return lambda batch: MADE.logits(phase)[batch.indices]


def graded(objective, rows=EVERYONE):
    """Value of an objective on one batch, and its gradient by the student's logits."""
    given = MADE.logits(MADE.STUDENT)[rows].requires_grad_()
    batch = Batch({"x": torch.zeros(len(rows), 1)}, MADE.LABELS[rows], rows)
    total = objective(lambda _: given, {part: batch for part in objective.parts}).total
    (gradient,) = torch.autograd.grad(total, given)
    return total.item(), gradient


def assert_same(gradient, expected, *, tolerance=1e-9):
    wanted = torch.tensor(expected, dtype=torch.float64).view_as(gradient)
    torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=1e-12)


def test_bad_teacher_is_the_published_loss_but_for_the_mean_over_classes():
    teachers = logits_of(MADE.COMPETENT), logits_of(MADE.INCOMPETENT)
    value, gradient = graded(TwoTeachers(*teachers, members_of(FORGOTTEN.numpy()), 2.0))
    expected = PEER["bad_teacher"]
    assert value / MADE.CLASSES == pytest.approx(expected["value"], rel=1e-12)
    assert_same(gradient / MADE.CLASSES, expected["gradient"])


def test_bad_teacher_trains_as_published():
    config = METHODS["bad_teacher"].Config()
    assert (config.lr, config.weight_decay, config.schedule) == (1e-4, 0.0, "constant")
    assert config.retain_share == 0.3


@pytest.mark.parametrize(
    ("case", "rows", "forgotten"),
    [("scrub maximize", FORGOTTEN, FORGOTTEN), ("scrub minimize", EVERYONE, FORGOTTEN[:0])],
)
def test_scrub_takes_the_published_steps(case, rows, forgotten):
    weights = {"temperature": MADE.TEMPERATURE, "gamma": MADE.GAMMA, "alpha": MADE.ALPHA}
    objective = Scrubbing(logits_of(MADE.COMPETENT), members_of(forgotten.numpy()), **weights)
    assert_same(graded(objective, rows)[1], PEER[case]["gradient"])


def test_sfron_ascends_the_published_loss():
    turns = SimpleNamespace(last_turn=0, count=1)
    value, gradient = graded(AlternatingAscent(turns, 10, alpha=3.0, lam=0.5))
    assert -value / 3 == pytest.approx(PEER["sfron"]["value"], rel=1e-9)
    assert_same(-gradient / 3, PEER["sfron"]["gradient"])


def test_boundary_shrink_finds_the_published_neighbours():
    model = MADE.classifier()
    bounds = {"x": (torch.tensor(0.0), torch.tensor(1.0))}
    objective = ToNeighbours(lambda batch: model(batch.inputs["x"]), bounds, MADE.BOUND)
    before = model(MADE.images()).argmax(1)
    found = objective.neighbours(Batch({"x": MADE.images()}, before, EVERYONE))
    assert found.tolist() == PEER["boundary"]
    assert 0 < (found != before).sum() < MADE.ROWS, "some images cross a boundary"


def test_unsir_learns_the_published_noise():
    model = MADE.classifier().requires_grad_(False)
    noise = _Noise(model, {"x": MADE.values(1.3, 4, 1, MADE.SIDE, MADE.SIDE)})
    objective = _Repel(noise, 2, MADE.DECAY)
    optimizer = make_optimizer(
        FitConfig(steps=MADE.NOISE_STEPS, lr=0.1), dict(noise.named_parameters())
    )
    for _ in range(MADE.NOISE_STEPS):
        optimizer.zero_grad()
        objective(lambda batch: model(batch.inputs["x"]), {}).total.backward()
        optimizer.step()
    assert_same(noise.inputs["x"].detach(), PEER["unsir"], tolerance=1e-7)


@pytest.mark.parametrize("share", PEER["salun"])
def test_salun_masks_the_published_weights(share):
    model = MADE.classifier().float()
    task = SimpleNamespace(model=model, forward=lambda model, batch: model(batch.inputs["x"]))
    batches = [
        Batch({"x": MADE.images()[rows].float()}, MADE.LABELS[rows], rows)
        for rows in EVERYONE.split(3)
    ]
    saliency = {name: g.abs() for name, g in summed_gradients(task, batches).items()}
    masks = top_share(saliency, float(share))
    for name, expected in PEER["salun"][share].items():
        assert masks[name].flatten().int().tolist() == expected, name


def test_fisher_takes_the_published_variances():
    method = METHODS["fisher"](METHODS["fisher"].Config(alpha=3e-6))
    for name, fisher in MADE.fishers().items():
        gone = [MADE.GONE] if name.startswith("head") else None
        assert_same(method.variance(fisher, gone), PEER["fisher"][name])
