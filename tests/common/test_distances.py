"""DeLoRA bounds the distance to Original, Weight Dist Reg asks for more: by their formulas."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods import base
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.finetuning import EPS, distance
from stable_forgetting.common.train.protocols import Telemetry


def run(tiny, name, params, **fields):
    """(Original, unlearned model, task)."""
    cls, source, model = METHODS[name], tiny.Source(noise=1.0), tiny.net()
    original = copy.deepcopy(model)
    split = tiny.split(source)
    task = tiny.task(source, split, access=cls.info.access, model=model, **fields)
    config = resolve_config(name, None, {"log_every": 1, **params}, origin="test")
    return original, cls(config).unlearn(task), task


def moved(original, model):
    before = dict(original.named_parameters())
    pairs = ((name, p.detach() - before[name].detach()) for name, p in model.named_parameters())
    return {name: delta for name, delta in pairs if bool(delta.any())}


# -- DeLoRA ---------------------------------------------------------------------------------------


@pytest.fixture
def delora(tiny):
    pytest.importorskip("peft")
    wild = {"lr": 0.3, "steps": 8, "batch_size": 8, "rank": 2, "strength": 0.5}
    return lambda **params: run(tiny, "gd_delora", {**wild, **params})


def factors_of(model):
    """Layer -> (dW by the formula, norms v of W0's columns, s)."""
    from peft.tuners.delora import DeloraLinear

    layers = {n: m for n, m in model.named_modules() if isinstance(m, DeloraLinear)}
    result = {}
    for name, layer in layers.items():
        (A,), (B,) = layer.delora_A.values(), layer.delora_B.values()
        (s,) = layer.delora_lambda.values()
        v = layer.get_base_layer().weight.norm(dim=0)
        terms = [
            torch.outer(B[:, i] / B[:, i].norm(), v * A[i] / A[i].norm()) for i in range(len(A))
        ]
        result[f"{name}.weight"] = s.detach() / len(A) * torch.stack(terms).sum(0), v, s.item()
    return result


def test_delora_merges_what_its_formula_says(delora, monkeypatch):
    from stable_forgetting.common.bounded import attach as module

    seen, merge = {}, module.detach

    def noting(model):
        seen.update(factors_of(model))
        return merge(model)

    monkeypatch.setattr(module, "detach", noting)
    original, model, task = delora()
    deltas = moved(original, model)
    assert deltas.keys() == seen.keys() and len(deltas) == 4
    for name, delta in deltas.items():
        torch.testing.assert_close(delta, seen[name][0], rtol=1e-4, atol=1e-6)
    assert all(s != 0.5 for _, _, s in seen.values()), "s is trained"
    shapes = {name: tensor.shape for name, tensor in original.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    rows = sum(sum(original.get_parameter(n).shape) * 2 + 1 for n in deltas)
    assert task.trained == rows, "what was trained is counted before it is merged"


def test_a_fixed_delora_stays_in_its_bound_at_a_wild_rate(delora):
    original, model, _ = delora(train_bound=False)
    deltas = moved(original, model)
    for name, delta in deltas.items():
        largest = original.get_parameter(name).norm(dim=0).max()
        assert 0.1 * 0.5 * largest < delta.norm() <= 0.5 * largest * (1 + 1e-5)
    _, wider, _ = delora(train_bound=False, strength=5.0)
    for name, delta in moved(original, wider).items():
        assert delta.norm() > 3 * deltas[name].norm()


def test_delora_shows_a_dense_model_while_it_trains(tiny, delora):
    names, steps = set(), []

    def look(model, step):
        names.update(name for name, _ in model.named_parameters())
        steps.append((step, copy.deepcopy(model)))
        return {}

    params = {"lr": 0.3, "steps": 8, "batch_size": 8, "rank": 2, "strength": 0.5}
    looking = {"telemetry": Telemetry(evaluate_during=look)}
    original, model, _ = run(tiny, "gd_delora", {**params, "evaluate_every": 4}, **looking)
    assert names == {name for name, _ in original.named_parameters()}
    assert [step for step, _ in steps] == [4, 8] and tiny.same(steps[-1][1], model)
    assert tiny.same(delora()[1], model), "looking changes nothing"


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    info = METHODS["gd_delora"].info
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'mine' needs peft: pip install .*\[peft\]'"):
        info.require("mine")
    monkeypatch.setattr(base, "find_spec", lambda name: SimpleNamespace())
    info.require("mine")


# -- Weight Dist Reg ------------------------------------------------------------------------------

SGD = {"optimizer": "sgd", "lr": 0.05, "batch_size": 8, "epochs": None, "steps": 3}


def test_weight_distance_steps_along_its_formula(tiny):
    """Three SGD steps by hand: the distance has no gradient at Original, then it pushes away."""
    original, model, _ = run(tiny, "weight_dist_reg", {**SGD, "a": 7.0})
    source = tiny.Source(noise=1.0)
    twin = tiny.task(source, tiny.split(source), access=frozenset({"retain"}))
    loader = twin.loader("retain", batch_size=8)
    start = torch.nn.utils.parameters_to_vector(original.parameters()).detach()
    hand = copy.deepcopy(original).train()
    for _ in range(3):
        batch = loader.next()
        hand.zero_grad()
        cross_entropy(tiny.forward(hand, batch), batch.labels).backward()
        with torch.no_grad():
            away = torch.nn.utils.parameters_to_vector(hand.parameters()) - start
            push = 7.0 * away / (len(start) * (away.square().mean() + EPS).sqrt())
            place = 0
            for parameter in hand.parameters():
                own = push[place : place + parameter.numel()].view_as(parameter)
                parameter -= 0.05 * (parameter.grad - own)
                place += parameter.numel()
    for name, delta in moved(hand, model).items():
        assert delta.abs().max() < 1e-6, name
    assert moved(original, hand)


def test_a_larger_weight_goes_further(tiny):
    adam = {"lr": 3e-3, "epochs": None, "steps": 30, "batch_size": 8}
    lengths = []
    for a in (0.0, 1.0, 100.0):
        original, model, _ = run(tiny, "weight_dist_reg", {**adam, "a": a})
        start = [parameter.detach() for parameter in original.parameters()]
        lengths.append(distance(model, start).item())
    assert lengths[0] < lengths[1] < lengths[2] and lengths[2] > 1.3 * lengths[0]
