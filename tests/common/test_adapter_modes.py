"""Adapters beyond the default: split, dropout, a start of their own, and merging that loses."""

from __future__ import annotations

import copy
import json
import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from stable_forgetting.common.base.config import digest, validate
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.bounded.attach import (
    BoundedLinear,
    adapted_layers,
    attach,
    detach,
)
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    load_adapter,
    save_adapter,
)
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.objectives.objectives import gradient_difference
from stable_forgetting.common.protocol.benchmark import Benchmark
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from stable_forgetting.common.train.protocols import Telemetry
from tests.common.made import noise, stream, trained_factors_

PHIS = ("sine", "tanh", "sigmoid", "relu", "clip", "identity")
LITERAL_AND_DROPOUT = ("paper_literal", "paper_dropout")
MLP = ("blocks.*.mlp.fc*",)


def adapted(tiny, seed=0, *, scale=0.3, **fields):
    """The tiny net with arbitrary factors, as if trained."""
    model = tiny.net()
    fields = {"rank": 2, "omega": 4.0} | fields
    attach(model, MLP, AdapterConfig(**fields), stream(seed))
    return trained_factors_(model, scale)


# Configs -----------------------------------------------------------------------------------------


def test_new_fields_leave_old_keys_alone():
    """Digests of configs from before mode and dropout."""
    old = "b7513c84731f70625abd3203b808d542cdcc598489700a2dbe4445130d7d0610"
    assert digest(AdapterConfig()) == old
    assert digest(AdapterConfig(mode="merged", dropout=0.0)) == old
    relative = AdapterConfig(phi="sine", omega=100.0, bound="relative")
    assert digest(relative) == "f1793eeb3da5d974b2e44fd0c982fd5d1628f5eb1676e657742773281d9157f7"


@pytest.mark.parametrize("fields", [{"mode": "split"}, {"dropout": 0.05}])
def test_a_field_that_is_set_is_hashed_and_survives_a_dump(fields):
    config = AdapterConfig(**fields)
    assert digest(config) != digest(AdapterConfig())
    assert AdapterConfig.model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"phi": "sine", "dropout": 0.05}, "dropout takes mode: split"),
        ({"dropout": 1.0}, "dropout"),
        ({"mode": "both"}, "mode"),
    ],
)
def test_options_that_do_not_fit_are_one_line(fields, words):
    with pytest.raises(ConfigError) as error:
        validate(AdapterConfig, fields, "mine.yaml")
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gd_lora", "gd_sine", "gd_tanh", "gd_sigmoid", "gd_relu"])
def test_the_papers_dropout_is_a_preset(name):
    literal, dropped = (resolve_config(name, p, {}, origin="t") for p in LITERAL_AND_DROPOUT)
    assert (dropped.adapter.mode, dropped.adapter.dropout) == ("split", 0.05)
    plain = dropped.adapter.model_copy(update={"mode": "merged", "dropout": 0.0})
    assert plain == literal.adapter, "phi and omega stay the method's own"
    assert dropped.model_copy(update={"adapter": literal.adapter}) == literal
    with pytest.raises(ConfigError, match="no preset"):
        resolve_config("gd", "paper_dropout", {}, origin="t")


# Split, dropout, bfloat16 gradients --------------------------------------------------------------


@pytest.mark.parametrize("phi", PHIS)
def test_split_is_the_same_function(tiny, phi):
    x = noise(5, 9, 6)
    models = [adapted(tiny, phi=phi, mode=mode) for mode in ("merged", "split")]
    outs = [model(x) for model in models]
    torch.testing.assert_close(outs[1], outs[0])
    for out in outs:
        out.square().sum().backward()
    for (_, one), (_, two) in zip(*map(adapted_layers, models), strict=True):
        torch.testing.assert_close(one.A.grad, two.A.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.Bt.grad, two.Bt.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(detach(models[1])(x), outs[0])


def test_split_keeps_an_update_that_merging_in_bfloat16_loses():
    """||dW|| of a thousandth of ||W0||: error of the dW that is multiplied with."""
    base = nn.Linear(256, 256, bias=False)
    base.weight.data = noise(2, 256, 256).bfloat16()
    A, Bt = noise(3, 256, 4), noise(4, 4, 256, scale=2.5e-4)
    lost = {}
    for mode in ("merged", "split"):
        layer = BoundedLinear(
            copy.deepcopy(base), AdapterConfig(rank=4, alpha=8.0, phi="sine", mode=mode), stream()
        )
        layer.A.data.copy_(A)
        layer.Bt.data.copy_(Bt)
        delta = layer.delta().detach().double()
        assert 5e-4 < delta.norm() / base.weight.double().norm() < 2e-3
        used = layer.effective_weight(torch.bfloat16).double()
        used = used if mode == "split" else used - base.weight.detach().double()
        lost[mode] = float((used - delta).norm() / delta.norm())
    assert lost["split"] < 4e-3 < 0.5 < lost["merged"]


@pytest.mark.parametrize("phi", ["sine", "identity"])
def test_dropout_falls_on_the_adapters_input_alone(phi):
    """Against the masks that torch draws; evaluation has none."""
    base = nn.Linear(6, 5)
    base.weight.data, base.bias.data = noise(1, 5, 6), noise(2, 5)
    config = AdapterConfig(rank=2, phi=phi, omega=2.0, mode="split", dropout=0.4)
    layer = BoundedLinear(copy.deepcopy(base), config, stream()).train()
    layer.A.data.copy_(noise(3, 5, 2))
    x = noise(4, 50, 6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        out = layer(x)
        torch.manual_seed(3)
        mask = nn.Dropout(0.4)(torch.ones_like(x))
        assert torch.is_nonzero((mask == 0).sum()) and not torch.equal(layer(x), out)
    torch.testing.assert_close(out, base(x) + (mask * x) @ layer.delta().T)
    layer.eval()
    torch.testing.assert_close(layer(x), base(x) + x @ layer.delta().T)


@pytest.mark.parametrize(("accumulation", "built"), [(1, 0), (4, 12)])
def test_micro_batches_share_the_effective_weights(tiny, builds, accumulation, built):
    """3 steps, 4 layers: once per step, however many micro-batches; the probe looks too."""
    source, model = tiny.Source(), adapted(tiny, phi="sine")
    loaders = {part: tiny.loader(source, range(16), 2, part) for part in ("forget", "retain")}
    config = FitConfig(steps=3, batch_size=8, accumulation=accumulation, probe_every=1, lr=1e-2)
    result = fit(model, gradient_difference(), loaders, config, forward=tiny.forward, seed=1)
    assert len(builds) == built and result.last["probe_grad_norm/all"] > 0


def test_evaluations_while_training_share_them_too(tiny, builds):
    """Steps 2 and 3 are watched: one build per layer each, for two passes."""
    source, model = tiny.Source(), adapted(tiny, phi="sine")
    batch = source.fetch(torch.arange(8))

    def watch(net, step):
        first, again = (tiny.forward(net, batch) for _ in range(2))
        assert torch.equal(first, again)
        return {"mean": float(first.detach().mean())}

    loaders = {part: tiny.loader(source, range(16), 2, part) for part in ("forget", "retain")}
    config = FitConfig(steps=3, batch_size=2, evaluate_every=2)
    options = {"forward": tiny.forward, "seed": 1, "telemetry": Telemetry(evaluate_during=watch)}
    fit(model, gradient_difference(), loaders, config, **options)
    assert len(builds) == 8


def test_an_evaluation_shares_them_too(tiny, builds):
    source, model = tiny.Source(), adapted(tiny, phi="sine")
    plan = SimpleNamespace(source=source, forward=tiny.forward, evaluation_batch=8)
    plan._read = partial(Benchmark._read, plan)
    scores = Benchmark.collect(plan, model, np.arange(40))
    assert len(scores.indices) == 40 and len(builds) == 4
    merged = Benchmark.collect(plan, detach(model), np.arange(40))
    np.testing.assert_allclose(scores.loss, merged.loss, rtol=1e-4, atol=1e-5)


# A start of their own ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["merged", "split"])
@pytest.mark.parametrize("phi", PHIS)
def test_any_phi_may_start_anywhere(tiny, phi, mode):
    x, plain = noise(5, 9, 6), tiny.net()
    model = adapted(tiny, phi=phi, mode=mode)
    for index, (_, layer) in enumerate(adapted_layers(model)):
        A, Bt = noise(20 + index, *layer.A.shape), noise(30 + index, *layer.Bt.shape)
        layer.set_start_(A, Bt)
        assert torch.equal(layer.A, A) and torch.equal(layer.Bt, Bt) and layer.A.requires_grad
        assert torch.count_nonzero(layer.delta()) == 0
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    (model(x) * noise(9, 9, 4)).sum().backward()
    for _, layer in adapted_layers(model):
        assert layer.A.grad.abs().max() > 0 and layer.Bt.grad.abs().max() > 0
        with torch.no_grad():
            layer.A.mul_(1.5)
        assert layer.delta().abs().max() <= layer.entry_bound * (1 + 1e-6)
        assert layer.delta().abs().max() > 0
    before = model(x)
    torch.testing.assert_close(detach(model)(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("phi", ["sine", "relu", "identity"])
def test_a_start_is_saved_and_loaded(tiny, tmp_path, phi):
    model = adapted(tiny, phi=phi)
    chosen = dict(adapted_layers(model))["blocks.1.mlp.fc1"]
    chosen.set_start_(noise(1, *chosen.A.shape), noise(2, *chosen.Bt.shape))
    chosen.A.data.add_(0.1)
    save_adapter(model, tmp_path)
    other = tiny.net()
    load_adapter(other, tmp_path)
    assert tiny.same(model, other) and torch.equal(model(noise(5, 3, 6)), other(noise(5, 3, 6)))
    started = [name for name, layer in adapted_layers(other) if layer.start is not None]
    assert started == ([n for n, _ in adapted_layers(model)] if phi == "relu" else started[:1])
    assert len(started) == (4 if phi == "relu" else 1)


@pytest.mark.parametrize("phi", ["sine", "relu"])
def test_adapters_from_before_starts_were_named_still_load(tiny, tmp_path, phi):
    model = adapted(tiny, phi=phi)
    save_adapter(model, tmp_path)
    meta = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert meta.pop("starts") == ([n for n, _ in adapted_layers(model)] if phi == "relu" else [])
    assert not {"mode", "dropout"} & set(meta["config"])
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(meta))
    other = tiny.net()
    load_adapter(other, tmp_path)
    assert tiny.same(model, other)


def test_a_damaged_start_is_refused(tiny, tmp_path):
    model = adapted(tiny, phi="sine")
    layer = model.blocks[0].mlp.fc1
    layer.set_start_(layer.A, layer.Bt)
    save_adapter(model, tmp_path)
    tensors = load_file(tmp_path / ADAPTER_WEIGHTS)
    del tensors["blocks.0.mlp.fc1.A0"]
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.fc1\.A0"):
        load_adapter(tiny.net(), tmp_path)
    meta = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(meta | {"starts": ["head"]}))
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapter(tiny.net(), tmp_path)


# Merging in low precision ------------------------------------------------------------------------


def warnings_of(caplog, merge):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        merge()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_lost_update_is_said_once_with_its_size(tiny, caplog, dtype):
    model = tiny.net().to(dtype)
    attach(model, MLP, AdapterConfig(rank=2, phi="sine"), stream())
    for index, (_, layer) in enumerate(adapted_layers(model)):
        layer.A.data.copy_(noise(index, *layer.A.shape, scale=3e-5))
    layers = [layer for _, layer in adapted_layers(model)]
    base = sum(float(la.weight.double().square().sum()) for la in layers) ** 0.5
    deltas = [la.delta().detach().double() for la in layers]
    size = sum(float(delta.square().sum()) for delta in deltas) ** 0.5
    before = [la.weight.detach().double() for la in layers]
    (text,) = warnings_of(caplog, lambda: detach(model))
    assert f"{size / base:.1e}" in text and "\n" not in text
    after = [m.weight.detach().double() for b in model.blocks for m in (b.mlp.fc1, b.mlp.fc2)]
    rows = zip(after, before, deltas, strict=True)
    lost = sum(float((a - b - d).square().sum()) for a, b, d in rows) ** 0.5 / size
    assert f"{100 * lost:.0f} %" in text and lost > 0.05


def test_what_is_kept_needs_no_warning(tiny, caplog):
    """Float32, an update that is large, and no update at all."""
    assert not warnings_of(caplog, lambda: detach(adapted(tiny, phi="sine", scale=1e-6)))
    for scale in (0.0, 3.0):
        model = tiny.net().bfloat16()
        attach(model, MLP, AdapterConfig(rank=2, phi="sine"), stream())
        for index, (_, layer) in enumerate(adapted_layers(model)):
            layer.A.data.copy_(noise(index, *layer.A.shape, scale=scale))
        assert not warnings_of(caplog, lambda: detach(model))  # noqa: B023
