"""What is logged: the documented names, at the step that they are of."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from stable_forgetting.common.bounded.attach import adapted_layers, attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.objectives.objectives import gradient_difference
from tests.common.train.trained import FORGET, MLP, RETAIN, Sink, small


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
