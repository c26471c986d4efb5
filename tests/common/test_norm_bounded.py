"""NB-LoRA: its singular values, what it can reach, where it starts, and that it merges."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.attach import attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.norm_bounded import NormBounded, cayley
from tests.common.made import normal, stream

K, D, RANK = 5, 7, 3


def made(size=0.5, dtype=torch.float64):
    weight = normal(K, D, seed=1).to(dtype)
    return weight, NormBounded(weight, RANK, size, stream()).to(dtype)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_cayley_makes_orthonormal_columns_of_anything(scale):
    Q = cayley(scale * normal(K + D, RANK))
    torch.testing.assert_close(Q.mT @ Q, torch.eye(RANK, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_no_singular_value_is_above_the_bound(scale):
    weight, layer = made(size=0.5)
    with torch.no_grad():
        layer.A.copy_(scale * normal(D, RANK, seed=2))
        layer.B.copy_(scale * normal(K, RANK, seed=3))
        update = layer(weight) - weight
    rms = torch.linalg.svdvals(weight).square().mean().sqrt()
    assert layer.bound == pytest.approx(0.5 * float(rms))
    assert torch.linalg.svdvals(update)[0] <= layer.bound * (1 + 1e-9)
    assert torch.linalg.svdvals(update)[RANK] < 1e-9 * layer.bound


def test_autocast_changes_no_update():
    """In bfloat16 the columns would not be orthonormal, and what is merged another update."""
    weight, layer = made(dtype=torch.float32)
    with torch.no_grad():
        layer.B.copy_(normal(K, RANK, seed=3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = layer(weight)
    assert torch.equal(within, layer(weight))


def test_every_update_below_the_bound_can_be_reached():
    weight, layer = made()
    U, _, V = torch.linalg.svd(normal(K, D, seed=4), full_matrices=False)
    wanted = (
        layer.bound * U[:, :RANK] @ torch.diag(torch.tensor([0.9, 0.5, 0.1]).double()) @ V[:RANK]
    )
    optimizer = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-15,  # torch's default ends near the limit below on some processors
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        missed = (layer(weight) - weight - wanted).square().sum() / layer.bound**2
        missed.backward()
        return missed

    optimizer.step(closure)
    assert closure().item() < 1e-8


def test_gradients_are_those_of_differences():
    weight, layer = made()
    with torch.no_grad():
        layer.B.copy_(normal(K, RANK, seed=3))

    def output(A, B):
        return torch.func.functional_call(layer, {"A": A, "B": B}, (weight,))

    inputs = [p.detach().clone().requires_grad_() for p in (layer.A, layer.B)]
    assert torch.autograd.gradcheck(output, inputs)


def test_a_model_starts_unchanged_trains_its_factors_alone_and_merges(tiny):
    model, x = tiny.net(), torch.randn(9, 6, generator=stream(11))
    before = model(x)
    names = attach(
        model, ("blocks.*.mlp.fc*",), AdapterConfig(peft="nb_lora", alpha=1.0, rank=2), stream()
    )
    torch.testing.assert_close(model(x), before)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(names) and all("parametrizations" in n for n in trained)
    model(x).square().sum().backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.sub_(0.1 * parameter.grad.sign())
    moved, keys = model(x).detach(), tiny.net().state_dict().keys()
    assert (moved - before).abs().max() > 1e-3
    copied = detach(copy.deepcopy(model))
    torch.testing.assert_close(copied(x), moved)
    assert copied.state_dict().keys() == keys
    assert all(type(copied.get_submodule(name)) is nn.Linear for name in names)
    torch.testing.assert_close(model(x), moved)  # the one that was copied keeps its adapters
    torch.testing.assert_close(detach(model)(x), moved)


def test_a_1x1_convolution_is_the_linear_map_that_it_is():
    model = nn.Sequential(nn.Conv2d(D, K, 1, bias=False))
    attach(model, ("0",), AdapterConfig(peft="nb_lora", alpha=0.5, rank=RANK), stream())
    with torch.no_grad():
        model[0].parametrizations.weight[0].B.normal_(generator=stream(3))
    x = torch.randn(2, D, 3, 3, generator=stream(5))
    dense = model[0].weight.detach().view(K, D)
    torch.testing.assert_close(model(x), torch.einsum("kd,ndij->nkij", dense, x))


def test_a_rank_beyond_the_layer_is_one_line():
    model = nn.Sequential(nn.Linear(D, K))
    with pytest.raises(ConfigError, match=rf"adapter.rank: {K + 1} is more than a layer of"):
        attach(model, ("0",), AdapterConfig(peft="nb_lora", rank=K + 1), stream())
