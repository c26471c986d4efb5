"""Exact updates: the optimizers are torch's, bit for bit, and nothing else is touched."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.objectives.objectives import ObjectiveValue, gradient_difference
from tests.common.train.trained import FORGET, MLP, RETAIN, Sink, adamw, cross_entropy, small


@pytest.mark.parametrize(
    ("fields", "make"),
    [
        ({"weight_decay": 0.0}, lambda model: adamw(model, 0.0)),
        ({"weight_decay": 0.1}, lambda model: adamw(model, 0.1)),
        (
            {"optimizer": "sgd", "momentum": 0.9},
            lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        ),
    ],
    ids=["adamw", "decay", "sgd"],
)
def test_optimizers_are_torchs_bit_for_bit(tiny, source, run, fields, make):
    mine, theirs = tiny.net(), tiny.net()
    run(mine, small(steps=12, lr=0.05, **fields))
    loader, optimizer = tiny.loader(source, RETAIN), make(theirs.train())
    for _ in range(12):
        loss = cross_entropy(tiny, "retain")(theirs, {"retain": loader.next()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert tiny.same(mine, theirs) and not tiny.same(mine, tiny.net())


def test_two_rates_is_the_papers_update_rule(tiny, source, run):
    """theta - alpha_r grad L_r + alpha_f grad L_f, three steps, in float64."""
    alpha_r, alpha_f = 0.05, 0.02
    model, reference = tiny.net().double(), tiny.net().double()
    source.x = source.x.double()
    config = small(steps=3, optimizer="sgd", lr=1.0)
    run(model, config, objective=gradient_difference(alpha_r, alpha_f))
    loaders = {"retain": tiny.loader(source, RETAIN), "forget": tiny.loader(source, FORGET)}
    for _ in range(3):
        gradients = []
        for part, loader in loaders.items():
            loss = cross_entropy(tiny, part)(reference, {part: loader.next()})
            gradients.append(torch.autograd.grad(loss, list(reference.parameters())))
        with torch.no_grad():
            for parameter, g_r, g_f in zip(reference.parameters(), *gradients, strict=True):
                parameter.sub_(alpha_r * g_r).add_(alpha_f * g_f)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_accumulation_equals_the_big_batch(tiny, source, run, optimizer):
    models, sinks = [], []
    for accumulation in (1, 2, 4):
        model, sink = tiny.net(), Sink()
        loaders = {"retain": tiny.loader(source, RETAIN, 16 // accumulation)}
        config = small(
            batch_size=16, accumulation=accumulation, optimizer=optimizer, lr=0.05, eps=1e-3
        )
        run(model, config, loaders=loaders, tracker=sink)
        models.append(model)
        sinks.append(sink)
    for model, sink in zip(models[1:], sinks[1:], strict=True):
        for mine, theirs in zip(model.parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        for step, row in sink.rows.items():
            for name in ("loss/retain_loss", "grad_norm/all", "lr"):
                assert row[name] == pytest.approx(sinks[0].rows[step][name], rel=1e-4)


def test_penalty_counts_once_under_accumulation(tiny, source, run):
    """Only a penalty: one SGD step must move by lr times its gradient."""

    class Nothing:
        parts = ("retain",)

        def __call__(self, forward, batches):
            zero = forward(batches["retain"]).sum() * 0
            return ObjectiveValue(zero, {"nothing": zero})

    for accumulation in (1, 4):
        model, sink = tiny.net(), Sink()
        before = model.head.weight.detach().clone()
        config = small(steps=1, accumulation=accumulation, optimizer="sgd", lr=0.1)
        penalty = lambda net: 0.5 * net.head.weight.square().sum()  # noqa: E731
        run(model, config, objective=Nothing(), penalty=penalty, tracker=sink)
        torch.testing.assert_close(model.head.weight, 0.9 * before)
        assert sink.rows[1]["loss/penalty"] == pytest.approx(float(0.5 * before.square().sum()))


def test_gradient_clipping(tiny, source, run):
    """One SGD step moves by lr * max_norm exactly; the logged norm is the one before clipping."""
    limit, lr = 0.01, 0.5
    model, sink = tiny.net(), Sink()
    before = tiny.snapshot(model)
    run(model, small(steps=1, optimizer="sgd", lr=lr, max_grad_norm=limit), tracker=sink)
    moved = math.sqrt(
        sum(float((v - before[k]).double().square().sum()) for k, v in model.state_dict().items())
    )
    assert moved == pytest.approx(lr * limit, rel=1e-3)
    reference = tiny.net().train()
    batch = tiny.loader(source, RETAIN).next()
    loss = cross_entropy(tiny, "retain")(reference, {"retain": batch})
    gradients = torch.autograd.grad(loss, list(reference.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert norm > 2 * limit
    assert sink.rows[1]["grad_norm/all"] == pytest.approx(norm, rel=1e-5)


def test_hooks_run_after_each_step_and_are_logged(tiny, run):
    seen, sink = [], Sink()

    def hook(model):
        seen.append(float(model.head.bias.detach().sum()))
        return {"hook/value": float(len(seen))}

    run(tiny.net(), small(), after_step=[hook, lambda model: None], tracker=sink)
    assert len(seen) == len(set(seen)) == 6
    assert [row["hook/value"] for row in sink.rows.values()] == [1, 2, 3, 4, 5, 6]


def test_same_seed_same_bits_and_another_seed_other_dropout(tiny, run):
    models = [tiny.net(dropout=0.3) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.rand(7)  # whatever the global stream did before must not matter
        run(model, small(), seed=seed)
    assert tiny.same(models[0], models[1]) and not tiny.same(models[0], models[2])


def test_the_global_stream_is_untouched(tiny, run):
    state, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run(tiny.net(dropout=0.3), small(probe_every=2))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002


def test_looking_changes_nothing(tiny, run):
    """Logging and probing, with dropout and running statistics, leave every bit alone."""
    quiet = tiny.net(dropout=0.3, batch_norm=True)
    run(quiet, small(log_every=100))
    probed = tiny.net(dropout=0.3, batch_norm=True)
    run(probed, small(log_every=1, probe_every=1), tracker=Sink())
    assert tiny.same(quiet, probed)


def test_frozen_parameters_keep_every_bit(tiny, run):
    model = tiny.net()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    before = tiny.snapshot(model)
    run(model, small(weight_decay=0.1, probe_every=2))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("blocks."), name
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (not name.startswith("blocks."))
        assert parameter.grad is None


def test_the_base_of_an_adapter_keeps_every_bit(tiny, run):
    model = tiny.net()
    attach(model, MLP, AdapterConfig(rank=2, phi="sine", omega=20.0), torch.Generator())
    before = tiny.snapshot(model)
    run(model, small(weight_decay=0.1, probe_every=1), objective=gradient_difference())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != name.endswith((".A", ".Bt")), name


@pytest.mark.parametrize("phi", [None, "identity", "sine", "relu"])
def test_bfloat16_runs_and_stays_near(tiny, run, phi):
    losses = {}
    for precision in ("no", "bf16", "no"):
        model, sink = tiny.net(), Sink()
        if phi is not None:
            config = AdapterConfig(rank=4, phi=phi, omega=20.0)
            attach(model, MLP, config, torch.Generator().manual_seed(1))
        run(model, small(steps=10, lr=1e-3, mixed_precision=precision), tracker=sink)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert "forward" not in model.__dict__
        losses.setdefault(precision, []).append(sink.rows[10]["loss/retain_loss"])
    first, again = losses["no"]
    assert first == again, "an earlier run's precision must not leak into the next"
    assert losses["bf16"][0] != first
    assert losses["bf16"][0] == pytest.approx(first, abs=0.1)


def test_two_fits_of_one_model_with_different_precision(tiny, run):
    model = tiny.net()
    run(model, small(mixed_precision="bf16"))
    run(model, small(mixed_precision="no"))
    run(model, small(mixed_precision="bf16", accumulation=2))
    twin = copy.deepcopy(model)
    assert twin(torch.zeros(2, 6)).dtype == torch.float32
    with torch.no_grad():
        model.head.bias.add_(1.0)
    assert not torch.equal(twin(torch.zeros(2, 6)), model(torch.zeros(2, 6)))
