"""Adapters: what they start as, where they can go, and what is left when they are merged."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.prune import l1_unstructured
from torch.utils._python_dispatch import TorchDispatchMode

from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.bounded.as_peft import write_peft
from stable_forgetting.common.bounded.attach import (
    BoundedLinear,
    adapted_layers,
    attach,
    clip_factors_,
    detach,
    factor_penalty,
    project_ball_,
    trainable_share,
)
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_state,
    load_adapter,
    save_adapter,
)
from stable_forgetting.common.bounded.statistics import adapter_statistics
from stable_forgetting.common.methods.delora import GDDelora
from stable_forgetting.common.methods.fast_ntk import FastNTK
from stable_forgetting.common.methods.gradient import AdaptedConfig, adapter_targets
from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from tests.common.made import stream

PHIS = ("sine", "tanh", "sigmoid", "relu", "clip", "identity")
CONFIGS = {
    **{phi: AdapterConfig(rank=3, phi=phi, omega=4.0) for phi in PHIS},
    "sine-relative": AdapterConfig(rank=3, phi="sine", bound="relative"),
    "tanh-relative": AdapterConfig(rank=3, phi="tanh", bound="relative", c=0.5),
}
MLP = ("blocks.*.mlp.fc*",)
BOUNDS = ("absolute", "relative")


def inputs(n=9):
    return torch.randn(n, 6, generator=stream(11))


def randomise(model, scale=0.5, seed=1):
    """Arbitrary factors, as if trained."""
    draws = stream(seed)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.A.copy_(scale * torch.randn(layer.A.shape, generator=draws))
            layer.Bt.copy_(scale * torch.randn(layer.Bt.shape, generator=draws))


def layer_with(A, Bt, config, weight=None):
    k, d = A.shape[0], Bt.shape[1]
    base = nn.Linear(d, k, bias=False)
    with torch.no_grad():
        base.weight.copy_(torch.randn(k, d, generator=stream(4)) if weight is None else weight)
    layer = BoundedLinear(base, config, stream())
    with torch.no_grad():
        layer.A.copy_(A)
        layer.Bt.copy_(Bt)
    return layer


def one_line(error) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


# The start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_the_start_changes_nothing(tiny, name):
    model, x = tiny.net(), inputs()
    before = model(x)
    names = attach(model, MLP, CONFIGS[name], stream())
    assert names == [f"blocks.{i}.mlp.fc{j}" for i in (0, 1) for j in (1, 2)]
    for _, layer in adapted_layers(model):
        assert torch.count_nonzero(layer.delta()) == 0
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6)


def test_hooks_of_a_layer_go_on_around_its_adapter_and_after_the_merge(tiny):
    model, seen = tiny.net(), []
    layer = model.get_submodule("blocks.0.mlp.fc1")
    called = layer.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    layer.register_forward_pre_hook(lambda *_, **__: seen.append("before"), with_kwargs=True)
    layer.register_full_backward_hook(lambda *_: seen.append("back"))
    attach(model, MLP, AdapterConfig(rank=2), stream(), trainable=("stem.*",))
    model(inputs()).sum().backward()
    assert seen == ["before", "BoundedLinear", "back"]
    model(inputs())
    detach(model)
    model(inputs())
    called.remove()
    model(inputs())
    assert seen[3:] == ["before", "BoundedLinear", "before", "Linear", "before"]


@pytest.mark.parametrize(
    ("fields", "slope"),
    [
        *(({"phi": phi, "bound": bound}, 1) for phi in ("sine", "tanh") for bound in BOUNDS),
        ({"phi": "sigmoid"}, 0.25),
    ],
    ids=str,
)
def test_initial_slope_is_that_of_lora_times_phis(fields, slope):
    """d(dW)/dA at the start: s * omega * phi'(0) * Bt, whatever the bound."""
    base, probe, slopes = nn.Linear(7, 6), torch.randn(6, 7, generator=stream(3)), []
    for chosen in (fields, {}):
        config = AdapterConfig(rank=2, omega=5.0, **chosen)
        layer = BoundedLinear(copy.deepcopy(base), config, stream())
        (layer.delta() * probe).sum().backward()
        slopes.append(layer.A.grad)
        assert config.slope == 5.0 * (slope if chosen else 1)
    torch.testing.assert_close(slopes[0], slope * slopes[1], rtol=1e-5, atol=1e-7)
    assert slopes[0].abs().max() > 0


def test_relu_trains_and_a_zero_start_would_not():
    base = nn.Linear(6, 5)
    layer = BoundedLinear(base, AdapterConfig(rank=2, phi="relu"), stream())
    x = torch.randn(8, 6, generator=stream(1))
    layer(x).square().sum().backward()
    assert layer.A.grad.norm() > 0 and layer.Bt.grad.norm() > 0
    with torch.no_grad():
        layer.A.zero_()
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert layer.A.grad.norm() == 0 and layer.Bt.grad.norm() == 0


@pytest.mark.parametrize("phi", ["sine", "tanh"])
def test_small_arguments_make_the_bounded_adapter_lora_omega(tiny, phi):
    """While max |argument| < 0.05 the bound changes dW by less than 0.05^2 / 2."""
    models = {}
    for name in (phi, "identity"):
        model = tiny.net()
        attach(model, MLP, AdapterConfig(rank=4, phi=name, omega=100.0), stream())
        randomise(model, scale=0.005)
        models[name] = model
    pairs = zip(adapted_layers(models[phi]), adapted_layers(models["identity"]), strict=True)
    for (_, layer), (_, lora) in pairs:
        assert layer.arguments().abs().max() < 0.05
        gap = (layer.delta() - lora.delta()).abs()
        assert (gap <= 0.05**2 / 2 * lora.delta().abs() + 1e-9).all()
        assert lora.delta().abs().max() > 1e-3
    x = inputs()
    torch.testing.assert_close(models[phi](x), models["identity"](x), rtol=1e-3, atol=1e-3)


# The bound ---------------------------------------------------------------------------------------

matrices = st.integers(0, 2**20).map(
    lambda seed: (
        torch.randn(7, 2, generator=stream(seed)),
        torch.randn(2, 5, generator=stream(seed + 1)),
    )
)


@settings(max_examples=60, deadline=None)
@given(
    pair=matrices,
    scale=st.floats(-6, 6),
    phi=st.sampled_from(["sine", "tanh", "sigmoid", "clip"]),
    alpha=st.floats(0.5, 64),
    omega=st.floats(0.01, 1000),
    clip=st.floats(0.1, 4),
)
def test_absolute_bound_for_arbitrary_factors(pair, scale, phi, alpha, omega, clip):
    config = AdapterConfig(rank=2, alpha=alpha, phi=phi, omega=omega, clip=clip)
    layer = layer_with(pair[0] * 10**scale, pair[1], config)
    supremum = {"sigmoid": 0.5, "clip": clip}.get(phi, 1.0)
    assert layer.entry_bound == pytest.approx(alpha / 2 * supremum)
    assert layer.delta().abs().max() <= alpha / 2 * supremum * (1 + 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    pair=matrices,
    scale=st.floats(-6, 6),
    phi=st.sampled_from(["sine", "tanh"]),
    c=st.floats(0.01, 4),
    size=st.floats(-3, 2),
)
def test_relative_bound_for_arbitrary_factors(pair, scale, phi, c, size):
    weight = 10**size * torch.randn(7, 5, generator=stream(8))
    config = AdapterConfig(rank=2, phi=phi, bound="relative", c=c)
    layer = layer_with(pair[0] * 10**scale, pair[1], config, weight)
    rms = float(weight.square().mean().sqrt())
    assert layer.delta().abs().max() <= c * rms * (1 + 1e-5)
    assert layer.delta().norm() <= c * weight.norm() * (1 + 1e-5)


def test_relu_and_identity_have_no_bound():
    for phi in ("relu", "identity"):
        layer = layer_with(torch.ones(3, 2) * 1e4, torch.ones(2, 3), AdapterConfig(rank=2, phi=phi))
        assert layer.entry_bound == math.inf
        assert layer.delta().abs().max() > 1e4


def test_relative_bound_needs_a_weight_and_a_bounded_phi():
    base = nn.Linear(3, 3)
    nn.init.zeros_(base.weight)
    with pytest.raises(ConfigError, match="not all zero") as error:
        BoundedLinear(base, AdapterConfig(phi="sine", bound="relative"), stream())
    one_line(error)
    with pytest.raises(ValidationError, match="relative takes"):
        AdapterConfig(phi="identity", bound="relative")


# Merging -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_equals_unmerged(tiny, name):
    model, x = tiny.net(), inputs(32)
    attach(model, MLP, CONFIGS[name], stream())
    randomise(model)
    before = model(x)
    merged = detach(copy.deepcopy(model))(x)
    torch.testing.assert_close(merged, before, rtol=1e-5, atol=1e-5)
    assert (before - tiny.net()(x)).abs().max() > 1e-2, "the adapter must have done something"


@pytest.mark.parametrize("name", CONFIGS)
def test_detach_restores_the_architecture(tiny, name):
    plain = tiny.net().eval()
    model = tiny.net().eval()
    attach(model, MLP, CONFIGS[name], stream())
    assert set(model.state_dict()) > set(plain.state_dict())
    assert detach(model) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    types = [(n, type(m), m.training) for n, m in plain.named_modules()]
    assert [(n, type(m), m.training) for n, m in model.named_modules()] == types
    for key, value in model.state_dict().items():
        assert value.dtype == plain.state_dict()[key].dtype
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=1e-7)


def test_torchs_encoder_layer_calls_its_adapters_in_eval_mode_too():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 1)})
    attach(model, ("*.linear*",), AdapterConfig(rank=2, phi="sine"), stream())
    randomise(model)
    model, x = copy.deepcopy(model), torch.randn(2, 5, 8, generator=stream(3))
    trained = model["encoder"](x)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()["encoder"](x), trained)
        with pytest.raises(ConfigError, match="use_nested_tensor to False, or detach"):
            model["encoder"](x, src_key_padding_mask=padded)
        torch.testing.assert_close(detach(model)["encoder"](x), trained)


def test_detach_gives_back_what_was_trainable_before_attach(tiny):
    model = tiny.net()
    model.stem.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    attach(model, ("blocks.*.mlp.fc1",), AdapterConfig(rank=2), stream())
    attach(model, ("blocks.*.mlp.fc2",), AdapterConfig(rank=2), stream(), trainable=("stem.*",))
    detach(copy.deepcopy(model).eval())
    detach(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in detach(model).parameters()), "nothing is attached"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("phi", PHIS)
def test_other_precisions_run_and_merge(tiny, phi, dtype):
    model, x = tiny.net().to(dtype), inputs().to(dtype)
    attach(model, MLP, CONFIGS[phi], stream())
    randomise(model, 0.1)
    before = model(x)
    merged = detach(model)
    assert before.dtype == dtype and merged.blocks[0].mlp.fc1.weight.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(merged(x), before, rtol=tolerance, atol=tolerance)


def test_layers_without_bias():
    layer = layer_with(torch.ones(3, 2), torch.ones(2, 4), AdapterConfig(rank=2, phi="sine"))
    x = torch.randn(2, 5, 4, generator=stream(2))
    merged, _ = layer.merge()
    assert merged.bias is None
    torch.testing.assert_close(merged(x), layer(x))


def test_plain_identity_is_pefts_lora(tiny):
    peft = pytest.importorskip("peft")
    config = AdapterConfig(rank=3, alpha=12.0)
    model = tiny.net()
    attach(model, MLP, config, stream())
    randomise(model)
    lora = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["fc1", "fc2"], lora_dropout=0.0)
    theirs = peft.get_peft_model(tiny.net(), lora)
    modules = dict(theirs.base_model.model.named_modules())
    with torch.no_grad():
        for name, layer in adapted_layers(model):
            modules[name].lora_B["default"].weight.copy_(layer.A)
            modules[name].lora_A["default"].weight.copy_(layer.Bt)
    x = inputs(16)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-6, atol=1e-6)
    mine = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert mine == sum(p.numel() for p in theirs.parameters() if p.requires_grad)


# Attaching ---------------------------------------------------------------------------------------


def test_only_factors_train(tiny):
    model = tiny.net()
    names = attach(model, MLP, AdapterConfig(rank=2), stream())
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == {f"{name}.{factor}" for name in names for factor in ("A", "Bt")}
    counted, base = trainable_share(model)
    assert counted == 2 * 2 * 2 * (8 + 12)
    assert base == sum(p.numel() for p in tiny.net().parameters())


def test_the_head_trains_when_asked_and_w0_never(tiny):
    model = tiny.net()
    attach(model, MLP, AdapterConfig(rank=2), stream(), trainable=("head.*",))
    assert model.head.weight.requires_grad and model.head.bias.requires_grad
    assert not model.stem.weight.requires_grad
    model = tiny.net()
    attach(model, ("head",), AdapterConfig(rank=2), stream(), trainable=("head.*",))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"head.A", "head.Bt"}


def test_a_layer_with_two_names_is_refused(tiny):
    model = tiny.net()
    model.blocks[1].mlp.fc1 = model.blocks[0].mlp.fc1
    with pytest.raises(ConfigError, match=r"'blocks.0.mlp.fc1' is also 'blocks.1.mlp.fc1'.*own"):
        attach(model, MLP, AdapterConfig(rank=2), stream())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_same_generator_same_factors(tiny):
    nets = [tiny.net() for _ in range(3)]
    for net, seed in zip(nets, (1, 1, 2), strict=True):
        attach(net, MLP, AdapterConfig(rank=2), stream(seed))
    assert tiny.same(nets[0], nets[1]) and not tiny.same(nets[0], nets[2])
    bound = 1 / math.sqrt(8)
    Bt = nets[0].blocks[0].mlp.fc1.Bt
    assert Bt.abs().max() <= bound and Bt.min() < -bound / 2 and Bt.max() > bound / 2


class _Own(nn.Linear):
    pass


def conv1d():
    from transformers.pytorch_utils import Conv1D

    return Conv1D(4, 6)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (conv1d, "Conv1D"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential"),
        (lambda: _Own(2, 2), "_Own"),
        (lambda: nn.Conv2d(1, 1, 3), "Conv2d"),
        (lambda: l1_unstructured(nn.Linear(2, 2), "weight", 0.5), "Linear whose weight a hook"),
    ],
)
def test_only_linear_layers_are_adapted(layer, kind):
    model = nn.ModuleDict({"mlp": layer(), "other": nn.Linear(2, 2)})
    with pytest.raises(ConfigError) as error:
        attach(model, ("mlp",), AdapterConfig(), stream())
    text = one_line(error)
    assert "'mlp'" in text and kind in text and "nn.Linear" in text
    assert all(p.requires_grad for p in model.parameters()), "an error must leave the model alone"


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ({}, "mlp; give adapter.targets, or choose a method without an adapter"),
        ({"attention": ("q",)}, "mlp; choose another placement (attention), give adapter.targets"),
    ],
)
def test_a_model_without_layers_for_a_placement_is_told_what_is_left(targets, words):
    task = SimpleNamespace(family=SimpleNamespace(targets=targets, layers=()))
    with pytest.raises(ConfigError) as error:
        adapter_targets(task, "mlp", None)
    assert words in one_line(error)


def test_an_empty_list_of_targets_is_not_the_usual_ones():
    for cls in (AdapterConfig, GDDelora.Config):
        with pytest.raises(ConfigError, match="at least 1 item"):
            validate(cls, {"targets": []}, "suite")
    with pytest.raises(ConfigError, match="at least 1 item"):
        validate(FastNTK.Config, {"parameters": []}, "suite")


def test_a_pattern_without_a_match_names_what_there_is(tiny):
    model = tiny.net()
    with pytest.raises(ConfigError) as error:
        attach(model, ("blocks.*.mlp.fc1", "layers.*.up"), AdapterConfig(), stream())
    text = one_line(error)
    assert "'layers.*.up' matches no layer" in text and "blocks.0.mlp.fc1" in text
    assert not list(adapted_layers(model)) and all(p.requires_grad for p in model.parameters())


def test_a_bare_layer_and_a_second_adapter_are_refused(tiny):
    with pytest.raises(ConfigError, match="whole model"):
        attach(nn.Linear(2, 2), ("*",), AdapterConfig(), stream())
    model = tiny.net()
    attach(model, MLP, AdapterConfig(), stream())
    with pytest.raises(ConfigError, match="BoundedLinear"):
        attach(model, MLP, AdapterConfig(), stream())


# Saving and loading ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tiny, tmp_path, name):
    model = tiny.net()
    attach(model, MLP, CONFIGS[name], stream(), trainable=("head.*",))
    randomise(model)
    with torch.no_grad():
        model.head.bias.add_(1.0)
    save_adapter(model, tmp_path)
    other = tiny.net()
    names = load_adapter(other, tmp_path)
    assert names == [name for name, _ in adapted_layers(model)]
    assert tiny.same(model, other)
    trainable = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (model, other)]
    assert trainable[0] == trainable[1]
    assert torch.equal(model(inputs()), other(inputs()))


def test_layers_keep_their_own_configs_in_a_file(tiny, tmp_path):
    model, other = tiny.net(), tiny.net()
    for place, name in enumerate(["relu", "sine"]):
        config = CONFIGS[name].model_copy(update={"rank": 2 + place, "alpha": 3.0})
        attach(model, [f"blocks.{place}.mlp.fc*"], config, stream(), trainable=("head.*",))
    randomise(model)
    save_adapter(model, tmp_path)
    assert load_adapter(other, tmp_path) == [name for name, _ in adapted_layers(model)]
    assert tiny.same(model, other) and torch.equal(model(inputs()), other(inputs()))
    assert all(layer.A.requires_grad for _, layer in adapted_layers(other))
    assert "several configs" in write_peft(adapter_state(model), tmp_path, base="x")["peft"]


def test_running_statistics_travel_with_the_adapter(tiny, tmp_path):
    model = tiny.net(batch_norm=True)
    attach(model, MLP, AdapterConfig(rank=2), stream())
    model.train()(inputs())
    save_adapter(model, tmp_path)
    other = tiny.net(batch_norm=True)
    load_adapter(other, tmp_path)
    assert tiny.same(model, other)
    assert not torch.equal(other.norm.running_mean, tiny.net(batch_norm=True).norm.running_mean)


@pytest.fixture
def saved(tiny, tmp_path):
    model = tiny.net()
    attach(model, MLP, AdapterConfig(rank=2, phi="sine"), stream())
    save_adapter(model, tmp_path)
    return tmp_path


def refused(model, folder) -> str:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_adapter(model, folder)
    assert before.keys() == model.state_dict().keys(), (
        "a refused adapter must leave the model alone"
    )
    text = one_line(error)
    assert str(folder) in text
    return text


def test_an_adapter_of_a_plugin_that_is_not_loaded_names_what_is_missing(tiny, saved):
    config = saved / ADAPTER_CONFIG
    config.write_text(config.read_text().replace('"sine"', '"softsign"'))
    text = refused(tiny.net(), saved)
    assert "plugin that is not loaded" in text and "unknown phi 'softsign'" in text


def test_another_base_is_refused(tiny, saved):
    assert "same base model" in refused(tiny.net(seed=9), saved)
    assert "wrong model" in refused(nn.Sequential(nn.Linear(2, 2)), saved)
    adapted = tiny.net()
    load_adapter(adapted, saved)
    assert "no linear layer" in refused(adapted, saved)


def test_missing_and_damaged_files_are_refused(tiny, saved):
    weights, config = saved / ADAPTER_WEIGHTS, saved / ADAPTER_CONFIG
    content, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(content[:-9])
    assert "damaged" in refused(tiny.net(), saved)
    weights.unlink()
    assert "missing" in refused(tiny.net(), saved)
    weights.write_bytes(content)
    layer = '"blocks.0.mlp.fc1": '
    meta = json.loads(text)
    damaged = [
        text[:-20],
        "[]",
        "\x00",
        "{}",
        json.dumps(meta | {"layers": "abc"}),
        json.dumps(meta | {"layers": {}}),
        json.dumps(meta | {"layers": {"blocks.0.mlp.fc1": 3}}),
        json.dumps(meta | {"config": {"rank": -1}}),
    ]
    assert layer in text.replace("\n", "")
    for bad in damaged:
        config.write_text(bad)
        assert "damaged" in refused(tiny.net(), saved), bad
    config.unlink()
    assert "missing" in refused(tiny.net(), saved)
    assert "missing" in refused(tiny.net(), saved / "nowhere")


def test_missing_foreign_and_misshapen_tensors_are_refused(tiny, saved):
    tensors = {k: v.clone() for k, v in load_file(saved / ADAPTER_WEIGHTS).items()}
    key = "blocks.1.mlp.fc2.A"
    cases = [
        {k: v for k, v in tensors.items() if k != key},
        tensors | {key: tensors[key][:, :1].clone()},
        tensors | {"nothing.here": torch.zeros(2)},
        tensors | {"head.weight": torch.zeros(2, 2)},
    ]
    for case in cases:
        save_file(case, saved / ADAPTER_WEIGHTS)
        assert "tensor '" in refused(tiny.net(), saved)


# Constraints -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    pair=matrices,
    scale=st.floats(-6, 8),
    phi=st.sampled_from(["identity", "sine", "tanh", "sigmoid", "clip"]),
    c=st.floats(0.01, 3),
    omega=st.floats(0.1, 100),
)
def test_ball_is_a_certificate_for_arbitrary_factors(pair, scale, phi, c, omega):
    config = AdapterConfig(rank=2, phi=phi, omega=omega)
    model = nn.Sequential(layer_with(pair[0] * 10**scale, pair[1], config))
    layer = model[0]
    before = [layer.A.clone(), layer.Bt.clone()]
    radius = c * float(layer.weight.norm())
    certified = 8.0 * omega * float((layer.A @ layer.Bt).detach().double().norm())
    share = project_ball_(model, c)
    assert layer.delta().double().norm() <= radius * (1 + 1e-4)
    assert (share == 1.0) == (certified > radius) or certified == pytest.approx(radius, rel=1e-4)
    if share == 0.0:
        assert torch.equal(layer.A, before[0]) and torch.equal(layer.Bt, before[1])
    assert project_ball_(model, c) == 0.0, "projecting twice must change nothing"


def test_ball_survives_cancelling_columns():
    """Huge factors whose product is moderate: the norm of the product counts, exactly."""
    column, row = torch.randn(7, 1, generator=stream(1)), torch.randn(1, 5, generator=stream(2))
    noise = 1e-3 * torch.randn(1, 5, generator=stream(3))
    A, Bt = torch.cat([column, -column], 1) * 3e3, torch.cat([row, row + noise], 0)
    model = nn.Sequential(layer_with(A, Bt, AdapterConfig(rank=2, alpha=2.0)))
    assert project_ball_(model, 0.25) == 1.0
    norm, radius = model[0].delta().double().norm(), 0.25 * model[0].weight.norm()
    assert norm <= radius * (1 + 1e-3)
    assert norm >= 0.95 * radius, "a projection ends on the sphere"


def test_ball_reports_the_share_and_skips_zero_and_nan_layers():
    config = AdapterConfig(rank=2)
    big, small = torch.full((3, 2), 50.0), torch.full((3, 2), 1e-6)
    Bt = torch.ones(2, 3)
    zero = layer_with(big, Bt, config, torch.zeros(3, 3))
    model = nn.Sequential(layer_with(big, Bt, config), layer_with(small, Bt, config), zero)
    assert project_ball_(model, 0.5) == 0.5
    assert torch.equal(zero.A, big)
    broken = nn.Sequential(layer_with(torch.full((3, 2), math.nan), Bt, config))
    assert project_ball_(broken, 0.5) == 0.0
    assert project_ball_(nn.Sequential(zero), 0.5) == 0.0


def test_a_ball_certifies_no_relu():
    for phi in PHIS:
        layer = BoundedLinear(nn.Linear(3, 3), AdapterConfig(rank=2, phi=phi), stream())
        if phi == "relu":
            with pytest.raises(ConfigError, match="no certificate for an adapter with a start"):
                project_ball_(layer, 0.5)
            with pytest.raises(ValueError, match="relu"):
                AdaptedConfig(ball=0.5, adapter=AdapterConfig(phi=phi))
        else:
            assert project_ball_(layer, 0.5) == 0.0
            AdaptedConfig(ball=0.5, adapter=AdapterConfig(phi=phi))


def test_weight_clipping(tiny):
    model = tiny.net()
    attach(model, MLP, AdapterConfig(rank=2), stream())
    randomise(model, scale=3.0)
    before = {name: (la.A.clone(), la.Bt.clone()) for name, la in adapted_layers(model)}
    head = model.head.weight.clone()
    clip_factors_(model, 1.5)
    for name, layer in adapted_layers(model):
        assert torch.equal(layer.A, before[name][0].clamp(-1.5, 1.5))
        assert torch.equal(layer.Bt, before[name][1].clamp(-1.5, 1.5))
        assert layer.A.requires_grad and layer.A.abs().max() == 1.5
    assert torch.equal(model.head.weight, head)


def test_factor_penalty_and_its_gradient_are_the_dense_ones(tiny):
    model = tiny.net()
    attach(model, MLP, AdapterConfig(rank=3), stream())
    randomise(model)
    factors = [p for _, layer in adapted_layers(model) for p in (layer.A, layer.Bt)]
    lean = factor_penalty(model)
    dense = sum((layer.A @ layer.Bt).square().sum() for _, layer in adapted_layers(model))
    torch.testing.assert_close(lean, dense, rtol=1e-5, atol=1e-6)
    pairs = zip(
        torch.autograd.grad(lean, factors), torch.autograd.grad(dense, factors), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# Statistics --------------------------------------------------------------------------------------


def test_statistics_are_the_dense_ones():
    A, Bt = torch.randn(4, 2, generator=stream(1)), torch.randn(2, 3, generator=stream(2))
    one = layer_with(A, Bt, AdapterConfig(rank=2, alpha=4.0, phi="sine", omega=0.5))
    two = layer_with(A * 0, Bt, AdapterConfig(rank=2, alpha=4.0, phi="sine", omega=0.5))
    stats = adapter_statistics(nn.Sequential(one, two))
    argument = 0.5 * A @ Bt
    delta = 2.0 * argument.sin()
    weight = one.weight
    assert stats["max_argument"] == pytest.approx(float(argument.abs().max()))
    assert stats["bound_active"] == pytest.approx(float((argument.abs() > 0.5).sum()) / 24)
    assert stats["delta_ratio_max"] == pytest.approx(float(delta.norm() / weight.norm()))
    assert stats["delta_ratio"] == pytest.approx(float(delta.norm() / weight.norm()) / math.sqrt(2))
    assert stats["certificate"] == pytest.approx(float(delta.norm()) / (2.0 * math.sqrt(24)))
    unbounded = nn.Sequential(layer_with(A, Bt, AdapterConfig(rank=2)))
    assert adapter_statistics(unbounded)["certificate"] == 0.0


# The rate of fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "scaling", "rate"),
    [("adamw", "slope", 1e-4), ("sgd", "slope", 1e-6), ("adamw", "none", 1e-2)],
)
def test_fit_takes_the_rate_of_a_plain_weight(tiny, optimizer, scaling, rate):
    source, net = tiny.Source(), tiny.net()
    attach(net, tiny.targets["mlp"], AdapterConfig(phi="sine", omega=100.0), torch.Generator())
    config = FitConfig(steps=1, lr=1e-2, batch_size=8, optimizer=optimizer)
    loaders = {"retain": tiny.loader(source, range(16))}
    options = {"forward": tiny.forward, "seed": 0, "lr_scaling": scaling}
    result = fit(net, CrossEntropy(), loaders, config, **options)
    assert result.last["lr"] == pytest.approx(rate)


def test_adapters_that_are_not_trained_change_no_rate_and_two_slopes_are_refused(tiny):
    source, net = tiny.Source(), tiny.net()
    attach(net, ["blocks.0.mlp.fc1"], AdapterConfig(phi="sine", omega=100.0), torch.Generator())
    attach(net, ["blocks.1.mlp.fc1"], AdapterConfig(), torch.Generator(), trainable=["head.*"])
    config = FitConfig(steps=1, lr=1e-2, batch_size=8)
    loaders = {"retain": tiny.loader(source, range(16))}
    options = {"forward": tiny.forward, "seed": 0}
    result = fit(net, CrossEntropy(), loaders, config, **options)
    assert result.last["lr"] == 1e-2  # sine's factors are frozen by the second call
    net.get_submodule("blocks.0.mlp.fc1").A.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"several slopes \(1, 100\).*lr_scaling='none'"):
        fit(net, CrossEntropy(), loaders, config, **options)


def test_statistics_wait_for_no_single_number(tiny):
    """On a card every ``float(tensor)`` stops the queue: there were four per layer."""

    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = tiny.net()
    attach(model, MLP, CONFIGS["sine"], stream())
    with Waits() as waits:
        assert adapter_statistics(model)["max_argument"] == 0.0
        assert waits.count == 0
        float(torch.ones(1))
    assert waits.count == 1
