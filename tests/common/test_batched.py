"""K runs in one forward are the K runs of the engine, one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.measure.scores import collect
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.train.batched import BatchedTraining, samples_are_independent

RATES, LAMBDAS = (1e-3, 1e-2, 1e-1), (0.1, 1.0, 3.0)
METHOD_NAMES = ("gd_lora", "gd_sine", "gd_tanh", "gd_ul", "gd_ball", "gd_weight_clip")


def configs(name, steps, **params):
    shared = {"steps": steps, "batch_size": 8, "log_every": 1, **params}
    return [
        resolve_config(name, None, {**shared, "lr": lr, "lam": lam}, origin="test")
        for lr, lam in zip(RATES, LAMBDAS, strict=True)
    ]


def batched(tiny, source, runs, steps):
    task = tiny.task(source, tiny.split(source), access=frozenset({"forget", "retain"}))
    plain, first = copy.deepcopy(task.model), runs[0]
    attach(task.model, tiny.targets["mlp"], first.adapter, task.generator("adapter"))
    training = BatchedTraining(
        task.model,
        task.loaders(("retain", "forget"), first.engine()),
        first.engine(),
        forward=tiny.forward,
        rates=[run.engine().lr for run in runs],
        weights=[run.forget_weight for run in runs],
        total=steps,
        forget_loss=first.forget_loss,
        ball=first.ball,
        weight_clip=first.weight_clip,
    )
    return training, plain


def one_by_one(tiny, source, name, config):
    task = tiny.task(source, tiny.split(source), access=METHODS[name].info.access)
    METHODS[name](config).unlearn(task)
    return task


def accuracy(tiny, source, model, part):
    batch = source.fetch(torch.as_tensor(tiny.split(source).parts[part]))
    return collect(lambda b: tiny.forward(model.eval(), b), [batch]).accuracy


@pytest.mark.parametrize("steps", [10, 30])
@pytest.mark.parametrize("name", METHOD_NAMES)
def test_batched_runs_are_the_engines(tiny, name, steps):
    source, runs = tiny.Source(), configs(name, steps)
    training, plain = batched(tiny, source, runs, steps)
    training.run_to(steps)
    outside = training.at_ball
    for k, config in enumerate(runs):
        task = one_by_one(tiny, source, name, config)
        training.write_(plain, k)
        for loss in ("retain_loss", "forget_loss"):
            expected = task.results[0].last[f"loss/{loss}"]
            assert float(training.losses[loss][k]) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        for part in ("forget", "retain", "test"):
            mine = accuracy(tiny, source, plain, part)
            assert mine == pytest.approx(accuracy(tiny, source, task.model, part), abs=1e-3)
        if config.ball:
            assert 0 <= outside[k] <= 1
    assert max(outside) > 0 or not runs[0].ball


def test_a_diverging_run_leaves_the_others_alone(tiny):
    source = tiny.Source()
    alone, _ = batched(tiny, source, configs("gd_lora", 10)[:2], 10)
    alone.run_to(10)
    *tame, last = configs("gd_lora", 10)
    wild = [*tame, last.model_copy(update={"lr": 1e30})]
    training, _ = batched(tiny, source, wild, 10)
    training.run_to(10)
    assert (
        training.guard.first_bad.tolist()[:2] == [-1, -1] and int(training.guard.first_bad[2]) > 0
    )
    assert [training.finite(k) for k in range(3)] == [True, True, False]
    assert torch.allclose(training.losses["forget_loss"][:2], alone.losses["forget_loss"])


def test_the_ball_holds_for_every_run(tiny):
    training, _ = batched(tiny, tiny.Source(), configs("gd_ball", 10, ball=0.05), 10)
    training.run_to(10)
    for layer in training.layers.values():
        norms = torch.linalg.matrix_norm(layer.delta())
        assert (norms <= 0.05 * torch.linalg.matrix_norm(layer.weight) * (1 + 1e-4)).all()


def test_bound_active_counts_entries(tiny):
    training, _ = batched(tiny, tiny.Source(), configs("gd_sine", 20), 20)
    assert training.shares_beyond((0.5,)) == [[0.0], [0.0], [0.0]]
    training.run_to(20)
    curved, turned = zip(*training.shares_beyond((0.5, 1.5)), strict=True)
    assert curved[0] < curved[2] <= 1
    assert all(more >= less for more, less in zip(curved, turned, strict=True))


class Depth(nn.Module):
    """Leaves whole samples out, as the stochastic depth of timm and of transformers does."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob


@pytest.mark.parametrize(
    ("layer", "fine"),
    [
        (nn.BatchNorm1d(2), False),
        (nn.Dropout(0.1), False),
        (nn.Dropout(0), True),
        (Depth(0.1), False),
        (Depth(0.0), True),
        (nn.MultiheadAttention(2, 1, dropout=0.1), False),
        (nn.MultiheadAttention(2, 1), True),
    ],
)
def test_layers_that_join_samples_are_seen(layer, fine):
    assert samples_are_independent(nn.Sequential(nn.Linear(2, 2), layer)) is fine
