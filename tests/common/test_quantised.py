"""Adapters on quantised layers: what they compute, their gradients, and what they refuse."""

from __future__ import annotations

import json
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.bounded.attach import (
    adapted_layers,
    attach,
    detach,
    project_ball_,
    trainable_share,
)
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    load_adapter,
    save_adapter,
)
from stable_forgetting.common.bounded.layer import reuse_weights
from stable_forgetting.common.bounded.quantised import (
    QuantisedBoundedLinear,
    dense_weight,
    is_quantised,
)
from stable_forgetting.common.bounded.statistics import adapter_statistics
from stable_forgetting.common.objectives.objectives import gradient_difference
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from tests.common.made import noise, stream, trained_factors_

MLP = ("blocks.*.mlp.fc*",)
LAYERS = ["blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.1.mlp.fc1", "blocks.1.mlp.fc2"]


def codes_of(weight):
    rows = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / rows).round().to(torch.int8), rows


class Int8Linear(nn.Linear):
    """int8 codes in the place of the weight, one scale a row, as in LLM.int8."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        codes, rows = codes_of(linear.weight)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.register_buffer("rows", rows)

    def dequantize(self):
        return self.weight * self.rows

    def forward(self, x):
        return F.linear(x, self.dequantize().to(x.dtype), self.bias.to(x.dtype))


class OpaqueLinear(nn.Module):
    """Codes as buffers, no bias, and no way to the dense weight, as in packed inference kernels."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, rows = codes_of(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("rows", rows)

    def forward(self, x):
        return F.linear(x, (self.codes * self.rows).to(x.dtype))


def torch_int8(linear):
    """torch's dynamic int8 layer: packed weight, no parameters, no gradient to x."""
    from torch.ao.nn.quantized import dynamic

    weight = linear.weight.detach()
    layer = dynamic.Linear(linear.in_features, linear.out_features)
    codes = torch.quantize_per_tensor(weight, float(weight.abs().max() / 127), 0, torch.qint8)
    layer.set_weight_bias(codes, linear.bias.detach())
    return layer


needs_engine = pytest.mark.skipif(
    torch.backends.quantized.engine == "none", reason="torch has no int8 kernels here"
)
OFFERING = [Int8Linear, pytest.param(torch_int8, marks=needs_engine)]
ALL = [*OFFERING, OpaqueLinear]
pytestmark = pytest.mark.filterwarnings("ignore:.*(uantiz|TypedStorage).*")


def quantised(tiny, kind, **fields):
    model = tiny.net(**fields)
    for name in LAYERS:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(model.get_submodule(name)))
    return model


def adapted(tiny, kind, *, scale=0.3, **fields):
    """With arbitrary factors, as if trained."""
    model = quantised(tiny, kind)
    fields = {"rank": 2, "omega": 4.0, "mode": "split"} | fields
    attach(model, MLP, AdapterConfig(**fields), stream())
    return trained_factors_(model, scale)


def one_layer(kind, **fields):
    linear = nn.Linear(6, 5)
    linear.weight.data.copy_(noise(3, 5, 6))
    linear.bias.data.copy_(noise(2, 5))
    model = nn.ModuleDict({"fc": kind(linear)})
    attach(model, ("fc",), AdapterConfig(**({"rank": 2, "mode": "split"} | fields)), stream())
    model["fc"].A.data.add_(noise(4, 5, 2, scale=0.3))
    return model["fc"]


# The function and its gradients ------------------------------------------------------------------


@pytest.mark.parametrize("phi", ["sine", "relu", "identity"])
@pytest.mark.parametrize("kind", ALL)
def test_the_base_runs_as_it_is_with_the_update_beside_it(kind, phi):
    layer, x = one_layer(kind, phi=phi, omega=3.0), noise(7, 2, 9, 6)
    assert type(layer) is QuantisedBoundedLinear and layer.delta().abs().max() > 0.1
    expected = layer.base(x) + F.linear(x, layer.delta())
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    with reuse_weights(layer):
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("phi", ["sine", "tanh", "identity"])
@pytest.mark.parametrize("kind", OFFERING)
def test_gradients_are_those_of_the_dequantised_layer(kind, phi):
    layer, x = one_layer(kind, phi=phi, omega=3.0), noise(7, 9, 6).requires_grad_()
    grad, base = noise(8, 9, 5), dense_weight(layer.base)
    leaves = (x, layer.A, layer.Bt)
    found = torch.autograd.grad((layer(x) * grad).sum(), leaves)
    reference = F.linear(x, base + layer.delta())
    expected = torch.autograd.grad((reference * grad).sum(), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None and not p.requires_grad for p in layer.base.parameters())


def test_bfloat16_activations_keep_their_dtype():
    layer, x = one_layer(Int8Linear, phi="sine"), noise(7, 9, 6)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x.bfloat16()).float(), layer(x), rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ALL)
def test_every_layer_of_a_quantised_model_trains(tiny, kind):
    model, source = adapted(tiny, kind, phi="sine", scale=0.0), tiny.Source()
    frozen = [layer.base(noise(1, 3, layer.Bt.shape[1])) for _, layer in adapted_layers(model)]
    loaders = {part: tiny.loader(source, range(16), 2, part) for part in ("forget", "retain")}
    config = FitConfig(steps=3, batch_size=2, lr=1e-2, probe_every=2 if kind is Int8Linear else 0)
    fit(model, gradient_difference(), loaders, config, forward=tiny.forward, seed=1)
    for (name, layer), before in zip(adapted_layers(model), frozen, strict=True):
        assert layer.delta().abs().max() > 0, f"{name} did not train"
        assert torch.equal(layer.base(noise(1, 3, layer.Bt.shape[1])), before)


# Measures and bounds -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OFFERING)
def test_norms_are_relative_to_the_dequantised_weight(tiny, kind):
    model = adapted(tiny, kind, phi="sine", bound="relative")
    layers = dict(adapted_layers(model))
    for layer in layers.values():
        rms = float(layer.weight.square().mean().sqrt())
        assert layer.bound.amplitude == pytest.approx(0.25 * rms) and rms > 0
    moved = math.sqrt(sum(float(la.delta().detach().square().sum()) for la in layers.values()))
    base = math.sqrt(sum(float(la.weight.square().sum()) for la in layers.values()))
    assert adapter_statistics(model)["delta_ratio"] == pytest.approx(moved / base, rel=1e-5)
    assert project_ball_(model, 0.01) == 1.0
    assert 0 < adapter_statistics(model)["delta_ratio_max"] <= 0.01 * (1 + 1e-4)


def test_a_base_without_a_dense_weight_says_so(tiny):
    model = adapted(tiny, OpaqueLinear)
    statistics = adapter_statistics(model)
    assert statistics["max_argument"] > 0 and "delta_ratio" not in statistics
    for refused in (
        lambda: project_ball_(model, 0.1),
        lambda: adapted(tiny, OpaqueLinear, phi="sine", bound="relative"),
    ):
        with pytest.raises(ConfigError, match="OpaqueLinear gives no dense weight") as error:
            refused()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", OFFERING)
def test_packed_weights_are_counted_as_weights(tiny, kind):
    plain = tiny.net()
    attach(plain, MLP, AdapterConfig(rank=2), stream())
    assert trainable_share(adapted(tiny, kind)) == trainable_share(plain)


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_the_merged_mode_is_refused(tiny, kind):
    model = quantised(tiny, kind)
    with pytest.raises(ConfigError, match=r"'blocks\.0\.mlp\.fc1'.* use mode: split") as error:
        attach(model, MLP, AdapterConfig(), stream())
    assert "\n" not in str(error.value) and not list(adapted_layers(model))
    assert model.stem.weight.requires_grad


@pytest.mark.parametrize("kind", ALL)
def test_merging_is_refused_and_changes_nothing(tiny, kind):
    model = quantised(tiny, kind)
    attach(model, ("stem", *MLP), AdapterConfig(rank=2, mode="split"), stream())
    kept = dict(adapted_layers(model))
    with pytest.raises(ConfigError, match=r"fc1' cannot be merged; keep it attached.*save_adapter"):
        detach(model)
    assert dict(adapted_layers(model)) == kept and len(kept) == 5
    with pytest.raises(ConfigError, match="save_adapter"):
        kept[LAYERS[0]].merge()


def test_only_quantised_layers_are_taken_for_such():
    attention = nn.MultiheadAttention(8, 2)  # reads its projection's weight past any forward
    assert not is_quantised(attention.out_proj)
    with pytest.raises(ConfigError, match="'out_proj' is a NonDynamically"):
        attach(attention, ("out_proj",), AdapterConfig(mode="split"), stream())
    bare = nn.Linear(2, 2)
    assert not is_quantised(bare)
    bare.weight = nn.Parameter(bare.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert is_quantised(bare) and dense_weight(bare) is None
    scripted = timm.layers.Linear(2, 2)  # multiplies as nn.Linear does, in a forward of its own
    assert not is_quantised(scripted) and torch.equal(dense_weight(scripted), scripted.weight)
    container = nn.Sequential(nn.Linear(2, 2))
    container.in_features = container.out_features = 2
    assert not is_quantised(container)


# Saving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("phi", ["sine", "relu"])
def test_round_trip(tiny, tmp_path, kind, phi):
    model, x = adapted(tiny, kind, phi=phi), noise(5, 3, 6)
    save_adapter(model, tmp_path)
    keys = ("A", "Bt", "A0", "Bt0") if phi == "relu" else ("A", "Bt")
    saved = load_file(tmp_path / ADAPTER_WEIGHTS)
    assert set(saved) == {f"{name}.{key}" for name in LAYERS for key in keys}
    other = quantised(tiny, kind)
    assert load_adapter(other, tmp_path) == LAYERS
    assert torch.equal(model(x), other(x)) and not torch.equal(model(x), quantised(tiny, kind)(x))


@pytest.mark.parametrize("kind", ALL)
def test_another_base_is_refused(tiny, tmp_path, kind):
    save_adapter(adapted(tiny, kind), tmp_path)
    rows = json.loads((tmp_path / ADAPTER_CONFIG).read_text())["layers"].values()
    assert {len(row) for row in rows} == {2 if kind is OpaqueLinear else 3}
    with pytest.raises(CheckpointError, match="not the one"):
        load_adapter(tiny.net(), tmp_path)
    if kind is not OpaqueLinear:
        with pytest.raises(CheckpointError, match="not the one"):
            load_adapter(quantised(tiny, kind, seed=1), tmp_path)
