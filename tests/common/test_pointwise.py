"""Adapters on 1x1 convolutions, beside the same adapters on dense layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.attach import adapted_layers, attach, detach, trainable_share
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.files import load_adapter, save_adapter
from stable_forgetting.common.bounded.quantised import BoundedPointwise
from stable_forgetting.common.bounded.statistics import adapter_statistics
from stable_forgetting.common.methods.delora import GDDelora, attach_delora
from tests.common.made import stream

CONFIGS = {
    "identity": AdapterConfig(rank=2),
    "sine": AdapterConfig(rank=2, phi="sine", omega=4.0),
    "tanh-relative": AdapterConfig(rank=2, phi="tanh", bound="relative"),
    "split": AdapterConfig(rank=2, phi="tanh", omega=4.0, mode="split"),
    "start": AdapterConfig(rank=2, phi="relu", omega=4.0),
}


def images(*, dtype=torch.float64):
    return torch.randn(3, 5, 4, 6, generator=stream(1), dtype=dtype)


def bottleneck(*, bias=True, dtype=torch.float64, layout=torch.contiguous_format):
    """An inverted bottleneck: expand, depthwise, project."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(5, 8, 1, bias=bias),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 5, 1, bias=bias),
        )
    return model.to(dtype).to(memory_format=layout)


def with_factors(model, seed=2):
    draw = stream(seed)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            for factor in (layer.A, layer.Bt):
                factor.copy_(0.3 * torch.randn(factor.shape, generator=draw))
    return model


def dense(model, x):
    """The same model with linear layers over the channels."""
    for module in model:
        if isinstance(module, BoundedPointwise):
            x = x.movedim(1, -1) @ (module.weight + module.delta()).mT
            x = (x if module.bias is None else x + module.bias).movedim(-1, 1)
        else:
            x = module(x)
    return x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_dense_map_of_every_position(name, bias):
    model = bottleneck(bias=bias)
    before = model(images())
    assert attach(model, ("0", "2"), CONFIGS[name], stream()) == ["0", "2"]
    torch.testing.assert_close(model(images()), before)
    with_factors(model)
    x = images().requires_grad_()
    expected, got = dense(model, x), model(x)
    assert not torch.allclose(got, before)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    assert len(leaves) == 5
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    for gradient, other in zip(
        torch.autograd.grad(got.square().sum(), leaves), wanted, strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CONFIGS)
def test_detached_it_is_a_plain_convolution_again(name, layout):
    model = bottleneck(dtype=torch.float32, layout=layout)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    attach(model, ("0", "2"), CONFIGS[name], stream())
    with_factors(model)
    x = images(dtype=torch.float32)
    adapted = model(x)
    detach(model)
    assert [type(module) for module in model] == 3 * [nn.Conv2d]
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes
    torch.testing.assert_close(model(x), adapted, rtol=1e-4, atol=1e-4)


def test_only_factors_are_trained_and_counted():
    model = bottleneck()
    total = sum(p.numel() for p in model.parameters())
    attach(model, ("0", "2"), CONFIGS["sine"], stream())
    assert trainable_share(model) == (2 * 2 * (5 + 8), total)
    assert adapter_statistics(with_factors(model))["delta_ratio"] > 0


def test_round_trip(tmp_path):
    model = bottleneck()
    attach(model, ("0", "2"), CONFIGS["sine"], stream())
    save_adapter(with_factors(model), tmp_path)
    other = bottleneck()
    assert load_adapter(other, tmp_path) == ["0", "2"]
    torch.testing.assert_close(other(images()), model(images()))


def test_delora_takes_linear_layers_only():
    family = SimpleNamespace(targets={})
    task = SimpleNamespace(model=bottleneck(), family=family, generator=lambda name: stream())
    config = GDDelora.Config(targets=["0", "2"])
    with pytest.raises(ConfigError, match="'0' is a 1x1 convolution"):
        attach_delora(task, config)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(5, 8, 3, padding=1),
        nn.Conv2d(5, 8, 1, stride=2),
        nn.Conv2d(5, 8, 1, padding=1),
        nn.Conv2d(6, 8, 1, groups=2),
    ],
)
def test_other_convolutions_are_refused(layer):
    with pytest.raises(ConfigError, match=r"not an nn\.Linear or a 1x1 convolution"):
        attach(nn.Sequential(layer), ("0",), CONFIGS["sine"], stream())
