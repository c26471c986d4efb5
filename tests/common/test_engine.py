"""The loop: exact updates, exact resumption, exact divergence, and nothing else touched."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from stable_forgetting.common.base import stopping
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, Diverged
from stable_forgetting.common.bounded.attach import adapted_layers, attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.data.loader import ChainedLoader, RelabelledLoader
from stable_forgetting.common.methods.forget_retain import ForgetConfig
from stable_forgetting.common.methods.gradient import GradientConfig
from stable_forgetting.common.objectives.objectives import (
    CrossEntropy,
    ObjectiveValue,
    gradient_difference,
)
from stable_forgetting.common.store import hashed
from stable_forgetting.common.train import loop
from stable_forgetting.common.train.config import (
    FitConfig,
    learning_rate,
    total_steps,
    warmup_steps,
)
from stable_forgetting.common.train.fit import fit
from stable_forgetting.common.train.tracking import Tracker, copy_scalars, read_scalars

MLP = ("blocks.*.mlp.fc*",)
RETAIN, FORGET = np.arange(0, 32), np.arange(32, 48)


class Sink:
    """Keeps logged scalars."""

    def __init__(self):
        self.rows = {}

    def scalars(self, step, values):
        self.rows[step] = dict(values)

    def rewind(self, step):
        self.rewound = step


class Killed(Exception):
    pass


def kill_at(last):
    def progress(step, total, loss):
        if step == last:
            raise Killed

    return progress


@pytest.fixture
def source(tiny):
    return tiny.Source()


@pytest.fixture
def run(tiny, source):
    """fit() on the retain part, or on both with a gradient difference."""

    def go(model, config, *, objective=None, loaders=None, seed=3, **options):
        objective = objective or CrossEntropy("retain")
        if loaders is None:
            loaders = {"retain": tiny.loader(source, RETAIN), "forget": tiny.loader(source, FORGET)}
        options = tiny.wired(**options)
        return fit(model, objective, loaders, config, forward=tiny.forward, seed=seed, **options)

    return go


def small(**fields):
    return FitConfig(**{"steps": 6, "batch_size": 8, "lr": 1e-2, "log_every": 1, **fields})


# Lengths and rates -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, *[1.0] * 9]),
        ({"schedule": "linear"}, [1 - k / 12 for k in range(12)]),
        (
            {"schedule": "linear", "warmup_steps": 4},
            [0.25, 0.5, 0.75, 1.0, *(1 - k / 8 for k in range(8))],
        ),
        ({"schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * k / 12)) for k in range(12)]),
        (
            {"schedule": "cosine", "warmup_steps": 4},
            [0.25, 0.5, 0.75, 1.0, *(0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8))],
        ),
    ],
    ids=str,
)
def test_rates_warm_up_and_follow_their_schedule_to_the_end(fields, expected):
    config = FitConfig(steps=12, lr=0.4, **fields)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates == pytest.approx([0.4 * share for share in expected])
    last = 0.0 if "schedule" in fields else 0.4
    assert learning_rate(config, 12, 12) == pytest.approx(last, abs=1e-12)


def lengths(count, **fields):
    """(steps, warm-up) of a run over so many forget samples and 3,600 retain ones."""

    class Counted:
        def __init__(self, samples, batch):
            self.samples, self.batches_per_epoch = samples, -(-samples // batch)

    config = FitConfig(**{"epochs": 5, "batch_size": 32, "accumulation": 4, **fields})
    loaders = {"retain": Counted(3600, 8), "forget": Counted(count, 8)}
    return total_steps(config, loaders), warmup_steps(config, loaders)


@pytest.mark.parametrize(("count", "steps", "warmup"), [(400, 62, 12), (200, 31, 6), (40, 6, 1)])
def test_steps_are_those_of_tofu_s_code(count, steps, warmup):
    fields = {"epochs_of": "forget", "warmup_epochs": 1, "timing": "transformers"}
    assert lengths(count, **fields) == (steps, warmup)
    assert lengths(count, **{**fields, "timing": "own"}) == (
        math.ceil(count * 5 / 32),
        math.ceil(count / 32),
    )
    assert lengths(count, **{**fields, "epochs_of": "retain"}) == (562, 112)


def test_epochs_count_a_part_that_is_there():
    with pytest.raises(ConfigError, match="reads no part 'forgot'; did you mean 'forget'"):
        lengths(400, epochs_of="forgot")
    for config in (GradientConfig(epochs=2), ForgetConfig(epochs=2)):
        assert config.epochs_of == "forget" and config.model_dump()["epochs_of"] == "forget"
    assert "epochs_of" not in GradientConfig(steps=2).model_dump()


def test_a_warm_up_is_given_once_is_shorter_than_the_run_and_changes_no_other_key():
    for fields, words in (
        ({"steps": 4, "warmup_steps": 4}, "warm-up is as long as the run"),
        ({"epochs": 2, "warmup_epochs": 2}, "warm-up is as long as the run"),
        ({"steps": 9, "warmup_steps": 3, "warmup_epochs": 1.0}, "or warmup_epochs, not both"),
    ):
        with pytest.raises(ValueError, match=words):
            FitConfig(**fields)
    assert "warmup_epochs" not in FitConfig(steps=9).model_dump()
    assert FitConfig(steps=9, warmup_epochs=2).model_dump()["warmup_epochs"] == 2.0
    with pytest.raises(ConfigError, match="warm-up of 113 steps leaves nothing of a run of 100"):
        lengths(400, epochs=None, steps=100, epochs_of="retain", warmup_epochs=1)


def test_the_first_rate_of_a_warm_up_is_zero_as_transformers_has_it():
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = get_linear_schedule_with_warmup(optimizer, 12, 62)
    config = FitConfig(steps=62, lr=0.5, schedule="linear", warmup_steps=12, timing="transformers")
    for step in range(62):
        assert learning_rate(config, step, 62) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_a_warm_up_in_epochs_counts_the_first_loader(tiny, source, run):
    loaders = {"retain": tiny.loader(source, RETAIN, 10), "forget": tiny.loader(source, FORGET, 4)}
    assert warmup_steps(FitConfig(steps=9, warmup_steps=3), loaders) == 3
    per_epoch = loaders["retain"].batches_per_epoch
    assert warmup_steps(FitConfig(steps=9, warmup_epochs=1.0), loaders) == per_epoch > 1
    whole = FitConfig(steps=9, warmup_epochs=0.5, batch_size=8, accumulation=2)
    assert warmup_steps(whole, loaders) == math.ceil(per_epoch / 4)
    sink = Sink()
    config = small(schedule="linear", warmup_epochs=1.0)
    run(tiny.net(), config, tracker=sink, loaders=loaders)
    rates = [learning_rate(config, step, 6, per_epoch) for step in range(6)]
    assert [sink.rows[step + 1]["lr"] for step in range(6)] == rates
    assert rates[0] == config.lr / per_epoch


def test_epochs_count_the_first_loader(tiny, source):
    loaders = {"retain": tiny.loader(source, RETAIN, 10), "forget": tiny.loader(source, FORGET, 4)}
    assert total_steps(FitConfig(epochs=3), loaders) == 12
    assert total_steps(FitConfig(epochs=3, accumulation=8), loaders) == 2
    assert total_steps(FitConfig(steps=5), loaders) == 5


# Updates -----------------------------------------------------------------------------------------


def cross_entropy(tiny, part):
    def loss_of(model, batches):
        batch = batches[part]
        return nn.functional.cross_entropy(tiny.forward(model, batch), batch.labels)

    return loss_of


def adamw(model, decay):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, fused=True)


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


# Divergence --------------------------------------------------------------------------------------


class Bad(CrossEntropy):
    """A loss that is spoilt from call ``at`` on (counted from 1)."""

    def spoil(self, at, value, part_only=False):
        object.__setattr__(self, "plan", (at, value, part_only))
        object.__setattr__(self, "calls", 0)
        return self

    def __call__(self, forward, batches):
        terms = super().__call__(forward, batches)
        object.__setattr__(self, "calls", self.calls + 1)
        at, value, part_only = self.plan
        if self.calls < at:
            return terms
        if part_only:
            return ObjectiveValue(
                terms.total, {**terms.parts, "extra": terms.total.detach() * 0 + value}
            )
        return ObjectiveValue(terms.total * value, terms.parts)


@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e6])
def test_divergence_names_the_first_bad_step(tiny, run, value, log_every):
    objective = Bad("retain").spoil(4, value)
    with pytest.raises(Diverged) as error:
        run(tiny.net(), small(log_every=log_every), objective=objective)
    assert error.value.step == 4 and "10000" in error.value.reason
    assert objective.calls == 4, "nothing runs after the first bad step"


def test_a_part_counts_too_and_the_cap_is_an_absolute_value(tiny, run):
    for value in (60.0, -60.0):
        with pytest.raises(Diverged) as error:
            run(tiny.net(), small(loss_cap=50), objective=Bad("retain").spoil(2, value, True))
        assert error.value.step == 2 and "50" in error.value.reason
    run(tiny.net(), small(loss_cap=70), objective=Bad("retain").spoil(2, 60.0, True))


def test_a_bad_micro_batch_counts_as_its_step(tiny, run):
    with pytest.raises(Diverged) as error:
        run(tiny.net(), small(accumulation=2), objective=Bad("retain").spoil(6, math.nan))
    assert error.value.step == 3


def test_parameters_that_end_non_finite_diverge(tiny, run):
    def blow(model):
        with torch.no_grad():
            model.head.bias[0] = math.inf

    with pytest.raises(Diverged, match=r"head\.bias") as error:
        run(tiny.net(), small(steps=1), after_step=[blow])
    assert error.value.step == 1


def test_divergence_gives_the_model_back_unwrapped(tiny, run):
    model = tiny.net()
    state = torch.get_rng_state()
    with pytest.raises(Diverged):
        run(model, small(mixed_precision="bf16"), objective=Bad("retain").spoil(1, math.nan))
    assert "forward" not in model.__dict__ and "_original_forward" not in model.__dict__
    assert torch.equal(torch.get_rng_state(), state)


# Determinism and side effects --------------------------------------------------------------------


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


# Checkpoints -------------------------------------------------------------------------------------


def mixed_loaders(tiny, source):
    everything = np.arange(48)
    relabelled = RelabelledLoader(
        tiny.loader(source, everything, 8, "mixed", augment=True), FORGET, tiny.classes
    )
    return {"retain": relabelled}


def chained_loaders(tiny, source):
    forget = RelabelledLoader(
        tiny.loader(source, FORGET, 8, "f", augment=True), FORGET, tiny.classes, exclude_true=True
    )
    return {"retain": ChainedLoader([forget, tiny.loader(source, RETAIN, 8, "r", augment=True)])}


def pair_loaders(tiny, source):
    return {
        "retain": tiny.loader(source, RETAIN, 8, "r", augment=True),
        "forget": tiny.loader(source, FORGET, 8, "f"),
    }


@pytest.mark.parametrize("killed_after", [4, 7, 9])
@pytest.mark.parametrize("loaders", [mixed_loaders, chained_loaders, pair_loaders])
@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd", "adapter"])
def test_a_killed_run_resumes_bit_for_bit(tiny, source, run, tmp_path, kind, loaders, killed_after):
    config = small(
        steps=10,
        checkpoint_every=2,
        weight_decay=0.01,
        optimizer="adamw" if kind in ("adamw", "adapter") else "sgd",
        momentum=0.9 if kind == "momentum" else 0.0,
    )
    objective = CrossEntropy() if loaders is not pair_loaders else gradient_difference()

    def go(path, **options):
        model, sink = tiny.net(dropout=0.3, batch_norm=True), Sink()
        if kind == "adapter":
            attach(
                model,
                MLP,
                AdapterConfig(rank=2, phi="tanh", omega=9.0),
                torch.Generator().manual_seed(1),
            )
        options |= {"loaders": loaders(tiny, source), "objective": objective, "tracker": sink}
        try:
            result = run(model, config, checkpoint=path, **options)
        except Killed:
            return model, sink, None
        return model, sink, result

    whole, sink, result = go(None)
    path = tmp_path / "deep" / "checkpoint.safetensors"
    go(path, progress=kill_at(killed_after))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    resumed, rest, again = go(path)
    assert tiny.same(whole, resumed)
    start = killed_after // 2 * 2
    assert rest.rows == {step: row for step, row in sink.rows.items() if step > start}
    assert rest.rewound == start
    assert again.last == result.last and again.peak == result.peak and again.steps == 10
    finished, rest, again = go(path, progress=kill_at(1))
    assert tiny.same(whole, finished) and not rest.rows, "a finished run is not trained again"
    assert again.last == result.last and again.peak == result.peak and again.steps == 10


def test_stateful_hooks_travel_with_the_checkpoint(tiny, run, tmp_path):
    class Counter:
        value = 0

        def __call__(self, model):
            self.value += 1

        def state(self):
            return {"value": torch.tensor(self.value)}

        def load_state(self, state):
            self.value = int(state["value"])

    class Empty:
        def state(self):
            return {}

        def load_state(self, state):
            assert not state

    path, counter = tmp_path / "c.safetensors", Counter()
    config = small(checkpoint_every=2)
    options = {"checkpoint": path, "stateful": {"counter": counter, "empty": Empty()}}
    with pytest.raises(Killed):
        run(tiny.net(), config, after_step=[counter], progress=kill_at(5), **options)
    counter = Counter()
    options["stateful"] = {"counter": counter, "empty": Empty()}
    run(tiny.net(), config, after_step=[counter], **options)
    assert counter.value == 6


def interrupted(tiny, run, path, **fields):
    with pytest.raises(Killed):
        run(tiny.net(), small(checkpoint_every=2, **fields), checkpoint=path, progress=kill_at(3))


def test_seconds_count_every_sitting(tiny, run, tmp_path):
    path = tmp_path / "c.safetensors"

    def slow(step, total, loss):
        time.sleep(0.05)
        if step == 4:
            raise Killed

    config = small(checkpoint_every=2)
    with pytest.raises(Killed):
        run(tiny.net(), config, checkpoint=path, progress=slow)
    assert run(tiny.net(), config, checkpoint=path).seconds > 0.1


def test_a_stopped_run_stays_stopped(tiny, run, tmp_path):
    path = tmp_path / "c.safetensors"
    config = small(evaluate_every=2, stop_below={"loss": 1})
    options = {"checkpoint": path, "evaluate_during": lambda model, step: {"loss": 9 - 3 * step}}
    first, again = (run(tiny.net(), config, **options) for _ in range(2))
    assert first.stopped == again.stopped == "loss < 1" and first.steps == again.steps == 4


def test_checkpoint_every_may_change(tiny, run, tmp_path, caplog):
    path = tmp_path / "c.safetensors"
    interrupted(tiny, run, path)
    with caplog.at_level("INFO"):
        run(tiny.net(), small(checkpoint_every=3), checkpoint=path)
    assert "resumed at step 2" in caplog.text


def test_damaged_and_foreign_checkpoints_start_again_with_one_line(tiny, run, tmp_path, caplog):
    path = tmp_path / "c.safetensors"
    config = unchanged = small(checkpoint_every=2)
    whole = tiny.net()
    run(whole, config)

    def refused(model=None, config=config, **options):
        content = path.read_bytes()
        caplog.clear()
        sink = Sink()
        trained = model or tiny.net()
        run(trained, config, checkpoint=path, tracker=sink, **options)
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        line = record.getMessage()
        assert "\n" not in line and str(path) in line and line.endswith("starts again")
        assert min(sink.rows) == 1 and sink.rewound == 0
        if model is None and config is unchanged and not options:
            assert tiny.same(trained, whole)
        path.write_bytes(content)
        return line

    interrupted(tiny, run, path)
    content = path.read_bytes()
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    for damaged in (b"", b"not a checkpoint", content[: len(content) // 2]):
        path.write_bytes(damaged)
        assert "damaged" in refused()
    for gone in ("model.head.weight", "rng", "optimizer.0.exp_avg", "state.retain.cursor"):
        save_file({k: v for k, v in tensors.items() if k != gone}, path, metadata=meta)
        assert "damaged" in refused(), gone
    save_file(tensors | {"model.head.bias": torch.zeros(9)}, path, metadata=meta)
    assert "damaged" in refused()
    for position in range(len(content) - 40, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 16
        path.write_bytes(flipped)
        assert "damaged" in refused()
    path.write_bytes(content)
    frozen = tiny.net()
    frozen.stem.requires_grad_(False)
    wider = tiny.net()
    wider.head = nn.Linear(8, 5)
    assert "another run" in refused(frozen)
    assert "another run" in refused(wider)
    assert "another run" in refused(config=small(checkpoint_every=2, lr=0.5))
    assert "another run" in refused(seed=4)


# What is logged ----------------------------------------------------------------------------------


def test_documented_names_are_logged(tiny, run):
    model, sink = tiny.net(), Sink()
    attach(
        model,
        MLP,
        AdapterConfig(rank=2, phi="sine", omega=9.0),
        torch.Generator(),
        trainable=("head.*",),
    )
    config = small(steps=7, log_every=3, probe_every=6)
    result = run(
        model,
        config,
        objective=gradient_difference(),
        tracker=sink,
        component_of=tiny.component_of,
        penalty=lambda net: net.head.weight.sum() * 0,
    )
    assert list(sink.rows) == [1, 3, 6, 7]
    always = {"loss/retain_loss", "loss/forget_loss", "loss/penalty", "lr"}
    always |= {f"{kind}_norm/{c}" for kind in ("grad", "weight") for c in ("A", "B", "head")}
    always |= {"logits/mean", "logits/spread"}
    always |= {
        f"adapter/{name}"
        for name in (
            "delta_ratio",
            "delta_ratio_max",
            "max_argument",
            "bound_active",
            "certificate",
        )
    }
    probes = {f"probe_grad_norm/{c}" for c in ("mlp", "head", "other")}
    probes |= {f"effective_weight_norm/{c}" for c in ("mlp", "head", "other")}
    for step, row in sink.rows.items():
        assert set(row) == (always | probes if step in (1, 6, 7) else always), step
        assert all(math.isfinite(value) for value in row.values())
    assert result.last == sink.rows[7]
    for name, value in result.peak.items():
        assert value == max(row[name] for row in sink.rows.values() if name in row)


def test_norms_and_logits_are_those_of_the_step(tiny, source, run):
    model, sink = tiny.net(), Sink()
    run(model, small(steps=1), tracker=sink, component_of=tiny.component_of)
    reference = tiny.net().train()
    batch = tiny.loader(source, RETAIN).next()
    logits = tiny.forward(reference, batch)
    nn.functional.cross_entropy(logits, batch.labels).backward()
    row = sink.rows[1]
    assert row["logits/mean"] == pytest.approx(float(logits.detach().mean()), abs=1e-6)
    assert row["logits/spread"] == pytest.approx(float(logits.detach().std(correction=0)), rel=1e-5)
    for component in ("mlp", "head", "other"):
        mine = [p for n, p in reference.named_parameters() if tiny.component_of(n) == component]
        gradient = math.sqrt(sum(float(p.grad.square().sum()) for p in mine))
        weight = math.sqrt(sum(float(p.detach().square().sum()) for p in mine))
        assert row[f"grad_norm/{component}"] == pytest.approx(gradient, rel=1e-5)
        assert row[f"weight_norm/{component}"] == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("phi", ["identity", "sine", "relu"])
def test_probe_norms_are_the_gradients_of_the_merged_model(tiny, source, run, phi):
    model, sink = tiny.net(), Sink()
    attach(model, MLP, AdapterConfig(rank=2, phi=phi, omega=3.0), torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.A.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    merged = detach(copy.deepcopy(model)).train().requires_grad_(True)
    objective = gradient_difference(1.0, 0.3)
    run(
        model,
        small(steps=1, probe_every=1),
        objective=objective,
        tracker=sink,
        component_of=tiny.component_of,
    )
    loaders = {"retain": tiny.loader(source, RETAIN), "forget": tiny.loader(source, FORGET)}
    batches = {name: loader.next() for name, loader in loaders.items()}
    objective(lambda batch: tiny.forward(merged, batch), batches).total.backward()
    row = sink.rows[1]
    for component in ("mlp", "head", "other"):
        mine = [
            p
            for n, p in merged.named_parameters()
            if p.ndim == 2 and tiny.component_of(n) == component
        ]
        gradient = math.sqrt(sum(float(p.grad.square().sum()) for p in mine))
        weight = math.sqrt(sum(float(p.detach().square().sum()) for p in mine))
        assert row[f"probe_grad_norm/{component}"] == pytest.approx(gradient, rel=1e-4)
        assert row[f"effective_weight_norm/{component}"] == pytest.approx(weight, rel=1e-5)


# Precision ---------------------------------------------------------------------------------------


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


# Evaluation in training --------------------------------------------------------------------------


class Noisy:
    """An evaluation that draws from the global stream and looks at the model's mode."""

    def __init__(self, metrics=lambda step: {"forget_prob": 100.0 - step}):
        self.metrics, self.seen = metrics, []

    def __call__(self, model, step):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        self.seen.append(step)
        return self.metrics(step)


def test_watching_changes_nothing(tiny, run, source):
    models = []
    for watch in (None, Noisy()):
        model = tiny.net()
        every = 0 if watch is None else 2
        run(model, small(evaluate_every=every), evaluate_during=watch)
        models.append(model)
    assert tiny.same(*models)
    assert watch.seen == [2, 4, 6] and models[0].training == models[1].training


def test_the_last_step_is_always_evaluated_and_logged(tiny, run):
    watch, sink = Noisy(), Sink()
    run(tiny.net(), small(steps=5, evaluate_every=3), evaluate_during=watch, tracker=sink)
    assert watch.seen == [3, 5]
    assert sink.rows[5] == {"evaluation/forget_prob": 95.0}


def test_early_stopping_needs_every_metric_below_its_limit(tiny, run):
    watch = Noisy(lambda step: {"forget_prob": 100.0 - step, "mu": 5.0 if step > 3 else None})
    config = small(evaluate_every=1, stop_below={"forget_prob": 98.5, "mu": 6})
    result = run(tiny.net(), config, evaluate_during=watch)
    assert (result.steps, result.stopped) == (4, "forget_prob < 98.5, mu < 6")
    alike = run(tiny.net(), small(evaluate_every=1), evaluate_during=Noisy())
    assert (alike.steps, alike.stopped) == (6, None)
    unknown = small(evaluate_every=1, stop_below={"forget_porb": 1.0})
    with pytest.raises(ConfigError, match=r"forget_porb.*forget_prob"):
        run(tiny.net(), unknown, evaluate_during=Noisy())
    with pytest.raises(ValueError, match="needs evaluate_every"):
        small(stop_below={"mu": 1.0})
    for limits, mend in (({"mu": "retrian"}, "mu: write a number or retrain"), ("gaol", "or goal")):
        with pytest.raises(ValueError, match=mend):
            small(evaluate_every=1, stop_below=limits)
    unresolved = small(evaluate_every=1, stop_below={"forget_prob": "retrain"})
    with pytest.raises(ConfigError, match="only a row of a suite has a Retrain"):
        run(tiny.net(), unresolved, evaluate_during=Noisy())


def test_a_pattern_gives_parameters_a_rate_of_their_own(tiny, run):
    start = {name: p.detach().clone() for name, p in tiny.net().named_parameters()}
    slow = next(iter(start))

    def trained(**changes):
        model = tiny.net()
        run(model, small(lr=1e-2, schedule="cosine", **changes))
        return {name: p.detach() for name, p in model.named_parameters()}

    plain, alike, apart = trained(), trained(lr_of={"*": 1e-2}), trained(lr_of={slow: 1e-4})
    assert all(torch.equal(plain[name], alike[name]) for name in plain)
    moved = {name: float((apart[name] - start[name]).abs().max()) for name in start}
    assert 0 < moved.pop(slow) < 1e-3 < min(moved.values())


def test_a_condition_stops_a_run_and_says_why(tiny, run):
    asked, whole, stopped = [], tiny.net(), tiny.net()

    def stop(model, step):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        asked.append(step)
        return "enough" if step == 4 else None

    run(whole, small(steps=4))
    result = run(stopped, small(), stop_when=stop)
    assert (result.steps, result.stopped, asked) == (4, "enough", [1, 2, 3, 4])
    assert tiny.same(whole, stopped), "asking changes nothing"


def test_a_launcher_with_its_own_loop_is_refused(tiny, run, monkeypatch):
    from accelerate import DistributedType

    monkeypatch.setattr(
        "stable_forgetting.common.train.launch.FOREIGN", {DistributedType.NO}
    )  # what runs here
    with pytest.raises(ConfigError, match=r"accelerate is set to NO.* or FSDP version 2"):
        run(tiny.net(), small())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_a_training_after_a_checkpoint(tiny, run, request, tmp_path, name):
    """At the next step, wherever checkpoint_every is; and the resumed run has the same weights."""
    path, number = tmp_path / "checkpoint.safetensors", getattr(signal, name)
    config, steps = small(steps=8, checkpoint_every=500), []

    def progress(step, total, loss):
        steps.append(step)
        if steps == [1, 2, 3]:
            os.kill(os.getpid(), number)

    usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    before = signal.signal(number, usual)  # a runner of tests may have its own
    request.addfinalizer(lambda: signal.signal(number, before))
    with stopping.listening(), pytest.raises(KeyboardInterrupt):
        run(tiny.net(), config, checkpoint=path, progress=progress)
    assert stopping.exit_code() == 128 + number and signal.getsignal(number) == usual
    assert steps == [1, 2, 3, 4] and path.is_file()
    model, whole = tiny.net(), tiny.net()
    steps.clear()
    run(model, config, checkpoint=path, progress=lambda step, total, loss: steps.append(step))
    assert steps == [5, 6, 7, 8]
    run(whole, config)
    for key, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)


def test_a_kill_between_a_checkpoint_and_its_evaluation_loses_neither(tiny, run, tmp_path):
    """A step is evaluated before it is kept: what stopped a run stops the resumed one, too."""
    path, seen = tmp_path / "checkpoint.safetensors", []

    def evaluate(model, step):
        seen.append(step)
        if seen == [2, 4]:
            raise Killed
        return {"loss": 1.0}

    config = small(steps=8, checkpoint_every=2, evaluate_every=2)
    with pytest.raises(Killed):
        run(tiny.net(), config, checkpoint=path, evaluate_during=evaluate)
    run(tiny.net(), config, checkpoint=path, evaluate_during=evaluate)
    assert seen == [2, 4, 4, 6, 8]


def test_a_training_that_starts_again_takes_the_later_ones_along(tiny, run, tmp_path):
    """Their rows leave the log with its own, so they may not go on from where they were."""
    paths = [tmp_path / f"checkpoint{end}.safetensors" for end in ("", "-1", "-2")]
    for path in paths:
        run(tiny.net(), small(checkpoint_every=2), checkpoint=path)
    paths[1].write_bytes(b"damaged")
    run(tiny.net(), small(checkpoint_every=2), checkpoint=paths[1])
    assert [path.is_file() for path in paths] == [True, True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_log_is_on_the_disk_before_its_checkpoint(tiny, run, tmp_path, monkeypatch):
    """Else a power cut leaves a checkpoint whose log lacks rows that nobody writes again."""
    synced, sync = [], os.fsync

    def fsync(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.split(".")[:2])
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    tracker = Tracker(tmp_path / "scalars.jsonl")
    config = small(steps=6, checkpoint_every=2)
    run(tiny.net(), config, checkpoint=tmp_path / "checkpoint.safetensors", tracker=tracker)
    one = [["scalars", "jsonl"], [tmp_path.name], ["", "checkpoint"], [tmp_path.name]]
    assert synced[2:] == 3 * one, "after the rewinding at the start"


@pytest.mark.parametrize("damage", ["swapped", "removed", "trajectory"])
def test_what_lies_next_to_a_checkpoint_is_checked_with_it(tiny, run, tmp_path, caplog, damage):
    """Rows that are gone would stay away for ever, and other rows would stay for ever."""
    log, scores = tmp_path / "scalars.jsonl", tmp_path / "trajectory" / "2.safetensors"
    config, path = small(steps=8, checkpoint_every=2), tmp_path / "checkpoint.safetensors"
    scores.parent.mkdir()
    scores.write_bytes(b"scores")

    def train(stop=None):
        def progress(step, total, loss):
            if step == stop:
                raise Killed

        with Tracker(log) as tracker:
            run(tiny.net(), config, checkpoint=path, tracker=tracker, progress=progress)

    with pytest.raises(Killed):
        train(5)
    whole = read_scalars(log)
    if damage == "swapped":
        log.write_text(log.read_text().replace('"step": 1,', '"step": 1, "other": 1,'))
    elif damage == "removed":
        log.unlink()
    else:
        scores.write_bytes(b"others")
    train()
    assert "not what was written; this training starts again" in caplog.text
    assert read_scalars(log)[: len(whole)] == whole and len(read_scalars(log)) == 8
    caplog.clear()
    train()
    assert "starts again" not in caplog.text


def test_a_stages_log_holds_its_rows_and_nothing_else(tmp_path):
    log, target = tmp_path / "scratch.jsonl", tmp_path / "scalars.jsonl"
    rows = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "loss": 1.5}', b'{"step": 2, "fa": 9.0}']
    log.write_bytes(b"\n".join(rows) + b"\n\x8f\x01 appended")
    copy_scalars(log, target)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "fa": 9.0}]


def test_a_checkpoint_is_due_after_minutes(tiny, run, tmp_path, monkeypatch):
    """The clock goes on by a minute at every look."""
    clock, saved = iter(range(0, 10**6, 60)), []
    write = loop.save
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))

    def save(run, path, step, *stopped):
        saved.append(step)
        write(run, path, step, *stopped)

    monkeypatch.setattr(loop, "save", save)
    config = small(steps=8, checkpoint_every="1.5min")
    run(tiny.net(), config, checkpoint=tmp_path / "c.safetensors")
    assert saved[-1] == 8 and 1 < len(saved) < 8
    with pytest.raises(ValueError):
        small(checkpoint_every="soon")


def test_an_end_whose_weights_are_stored_next_is_no_checkpoint(tiny, run, tmp_path):
    path = tmp_path / "c.safetensors"
    run(tiny.net(), small(steps=6, checkpoint_every=4), checkpoint=path, keeps_last=False)
    assert json.loads(hashed.read_metadata(path)["notes"])["step"] == 4
    path.unlink()
    run(tiny.net(), small(steps=4, checkpoint_every=4), checkpoint=path, keeps_last=False)
    assert not path.exists()


def test_a_file_is_hashed_while_it_is_written(tmp_path):
    """One tensor at a time in main memory, of any type and shape; safetensors reads it."""
    tensors = {
        "bool": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "half": torch.randn(3, 5).bfloat16().T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "whole": torch.randn(7, 2),
    }
    path = tmp_path / "x.safetensors"
    hashed.write_hashed(path, tensors, {"notes": '"sha256": "' + "0" * 64})
    hashed.check_hashed(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    content = path.read_bytes()
    for position in range(8, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            hashed.check_hashed(path)
