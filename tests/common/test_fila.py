"""FILA: the weighted optimum, the Fisher pass, and a start that changes no function."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.attach import adapted_layers, attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig, FilaConfig
from stable_forgetting.common.bounded.files import load_adapter, save_adapter
from stable_forgetting.common.checks.tiny_task import problem_of
from stable_forgetting.common.methods.tools import fila
from stable_forgetting.common.objectives.positions import cross_entropy
from stable_forgetting.common.train.protocols import Telemetry
from tests.common.made import normal
from tests.common.train.trained import Sink

BOTH = frozenset({"forget", "retain"})


def error(weight, rows, product):
    return float((rows.unsqueeze(1) * (weight - product)).square().sum())


# The weighted optimum ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1e-6, 1.0, 1e6])
def test_constant_weights_give_the_top_singular_vectors(level):
    W = normal(9, 6)
    A, Bt = fila.weighted_factors(W, torch.full((9,), level, dtype=torch.float64), 3)
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    torch.testing.assert_close(A @ Bt, U[:, :3] * S[:3] @ Vh[:3])


def test_the_product_is_the_weighted_rank_r_optimum():
    """Its error is the tail of the weighted spectrum, and descent from elsewhere ends there."""
    W, rows = normal(7, 5), normal(7, seed=1).exp()
    A, Bt = fila.weighted_factors(W, rows, 2)
    found = error(W, rows, A @ Bt)
    tail = torch.linalg.svdvals(rows.unsqueeze(1) * W)[2:]
    assert found == pytest.approx(float(tail.square().sum()))
    L, R = normal(7, 2, seed=2).requires_grad_(), normal(2, 5, seed=3).requires_grad_()
    search = torch.optim.LBFGS([L, R], max_iter=400, line_search_fn="strong_wolfe")

    def closure():
        search.zero_grad()
        loss = (rows.unsqueeze(1) * (W - L @ R)).square().sum()
        loss.backward()
        return loss

    search.step(closure)
    assert found <= error(W, rows, (L @ R).detach()) + 1e-9
    torch.testing.assert_close((L @ R).detach(), A @ Bt, rtol=1e-3, atol=1e-4)
    unweighted, right = fila.weighted_factors(W, torch.ones_like(rows), 2)
    assert error(W, rows, unweighted @ right) > found * 1.01


def test_the_papers_split_and_the_balanced_one_have_one_product():
    W, rows = normal(7, 5), 1e-3 * normal(7, seed=1).exp()
    A, Bt = fila.weighted_factors(W, rows, 2)
    U, S, Vh = torch.linalg.svd(rows.unsqueeze(1) * W, full_matrices=False)
    torch.testing.assert_close(A.abs(), ((1 / rows).unsqueeze(1) * U[:, :2] * S[:2].sqrt()).abs())
    torch.testing.assert_close(Bt.abs(), (S[:2].sqrt().unsqueeze(1) * Vh[:2]).abs())
    even, right = fila.weighted_factors(W, rows, 2, balanced=True)
    torch.testing.assert_close(even @ right, A @ Bt)
    assert float(even.norm()) == pytest.approx(float(right.norm()))
    assert float(A.norm()) > 100 * float(Bt.norm())


def test_rows_without_weight_are_projected_not_blown_up():
    W, rows = normal(6, 5), normal(6, seed=1).exp()
    rows[2] = 0.0
    A, Bt = fila.weighted_factors(W, rows, 2)
    assert torch.isfinite(A).all() and (A @ Bt)[2].norm() <= W[2].norm()
    one = torch.outer(normal(6), normal(5, seed=1))
    A, Bt = fila.weighted_factors(one, rows, 3)  # rank 1: two of three columns are empty
    torch.testing.assert_close(A @ Bt, one)


def test_the_published_factors_are_close_to_exact_and_leave_the_global_stream():
    W, rows = normal(20, 12).float(), normal(20, seed=1).exp().float()
    W[:, 2:] *= 1e-3
    stream = torch.get_rng_state()
    published = [fila.published_factors(W, rows, 2, 1e-5, seed) for seed in (1, 1)]
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.equal(published[0].A, published[1].A)
    exact = fila.weighted_factors(W, rows, 2)
    product = published[0].A @ published[0].Bt
    torch.testing.assert_close(product, exact.A @ exact.Bt, rtol=1e-3, atol=1e-3)


def test_a_rank_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"adapter\.rank: 6 is larger than a layer of"):
        fila.weighted_factors(normal(5, 9), torch.ones(5), 6)


# The Fisher pass ---------------------------------------------------------------------------------


def fisher_by_hand(tiny, model, names, batches):
    sums, count = {name: 0.0 for name in names}, 0
    for batch in batches:
        model.zero_grad()
        cross_entropy(tiny.forward(model, batch), batch.labels).mean().backward()
        for name in names:
            sums[name] += model.get_parameter(name).grad.square() * len(batch)
        count += len(batch)
    model.zero_grad(set_to_none=True)
    return {name: value / count for name, value in sums.items()}


def test_fisher_squares_batch_gradients(tiny):
    source, model = tiny.Source(), tiny.net(dropout=0.5)
    model.stem.weight.requires_grad_(False)
    names = ["blocks.0.mlp.fc1.weight", "stem.weight"]
    ids = torch.arange(20)
    for size in (4, 10):
        batches = [source.fetch(part) for part in ids.split(size)]
        found = fila.fisher_information(model, names, tiny.forward, batches)
        assert model.training
        assert not model.stem.weight.requires_grad and model.head.weight.requires_grad
        assert all(p.grad is None for p in model.parameters())
        frozen = copy.deepcopy(model).requires_grad_(True).eval()
        for name, expected in fisher_by_hand(tiny, frozen, names, batches).items():
            torch.testing.assert_close(found[name], expected)


def test_row_weights():
    forget, retain = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[0.5, 1.5], [1.0, 1.0]])
    assert fila.row_weights(forget, retain, 0.5).tolist() == [
        pytest.approx(math.sqrt(1 / 1 + 3 / 2)),
        0.0,
    ]


# The start ---------------------------------------------------------------------------------------


def started(config, adapter, seed=1):
    model = copy.deepcopy(problem_of("").original)
    task = problem_of("").task(model, "random", seed, BOTH)
    task.telemetry = Telemetry(tracker=Sink())
    attach(model, task.family.targets["mlp"], adapter, task.generator("adapter"))
    facts = fila.start_adapters(task, config)
    return model, task, facts


ADAPTERS = {
    "lora": AdapterConfig(rank=3),
    "alpha": AdapterConfig(rank=3, alpha=1.5),
    "omega": AdapterConfig(rank=3, omega=100.0),
    "sine": AdapterConfig(rank=3, phi="sine", omega=100.0),
    "tanh": AdapterConfig(rank=3, phi="tanh", omega=10.0),
    "relative": AdapterConfig(rank=3, phi="sine", bound="relative"),
}


@pytest.mark.parametrize("config", [FilaConfig(), FilaConfig(compat="loku")], ids=["exact", "loku"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_function_is_kept_at_the_start_and_after_saving(tmp_path, name, config):
    before = problem_of("").outputs(copy.deepcopy(problem_of("").original))
    model, _, _ = started(config, ADAPTERS[name])
    torch.testing.assert_close(problem_of("").outputs(model), before, rtol=0, atol=1e-6)
    assert all(layer.A.abs().max() > 0 and layer.start for _, layer in adapted_layers(model))
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.A.add_(0.01)
    save_adapter(model, tmp_path)
    loaded = copy.deepcopy(problem_of("").original)
    load_adapter(loaded, tmp_path)
    torch.testing.assert_close(
        problem_of("").outputs(loaded), problem_of("").outputs(model), rtol=0, atol=1e-6
    )
    assert (problem_of("").outputs(loaded) - before).abs().max() > 1e-3
    torch.testing.assert_close(
        problem_of("").outputs(detach(loaded)), problem_of("").outputs(model), rtol=1e-4, atol=1e-5
    )


def test_every_alpha_omega_and_bound_starts_on_the_same_part_of_the_weight():
    parts = {}
    for name, adapter in ADAPTERS.items():
        model, _, _ = started(FilaConfig(), adapter)
        parts[name] = [
            la.bound.amplitude * la.bound.frequency * la.A @ la.Bt
            for _, la in adapted_layers(model)
        ]
    for name, products in parts.items():
        for found, expected in zip(products, parts["lora"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_base_minus_start_plus_adapter_is_the_published_parametrisation():
    """dW = s (A Bt - A0 Bt0) on W is s A Bt on W_res = W - s A0 Bt0: one function, one gradient."""
    model, _, _ = started(FilaConfig(), ADAPTERS["lora"])
    _, layer = next(iter(adapted_layers(model)))
    A, Bt = (factor.detach().clone().requires_grad_() for factor in (layer.A, layer.Bt))
    scale = layer.config.scale
    residual = (layer.weight - scale * A @ Bt).detach()
    x = normal(5, layer.weight.shape[1]).float()
    ours = layer(x)
    theirs = torch.nn.functional.linear(x, residual + scale * A @ Bt, layer.bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    push = normal(*ours.shape, seed=4).float()
    mine = torch.autograd.grad((ours * push).sum(), [layer.A, layer.Bt])
    for found, expected in zip(
        mine, torch.autograd.grad((theirs * push).sum(), [A, Bt]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_start_is_the_optimum_for_the_fishers_of_its_batches():
    config = FilaConfig(batch_size=8)
    model, task, _ = started(config, ADAPTERS["lora"])
    fishers, read = {}, {"batch_size": 8, "augment": False, "stream": "fila"}
    for part in ("forget", "retain"):
        loader = task.loader(part, **read)
        count = task.loader("forget", **read).batches_per_epoch
        batches = [loader.next() for _ in range(count)]
        names = [f"{name}.weight" for name, _ in adapted_layers(model)]
        fishers[part] = fila.fisher_information(
            copy.deepcopy(problem_of("").original), names, task.forward, batches
        )
    for name, layer in adapted_layers(model):
        pair = (fishers[part][f"{name}.weight"] for part in ("forget", "retain"))
        expected = fila.weighted_factors(layer.weight, fila.row_weights(*pair, config.eps), 3)
        found = layer.config.scale * layer.A @ layer.Bt
        torch.testing.assert_close(found, expected.A @ expected.Bt, rtol=1e-4, atol=1e-5)


def test_the_retain_fisher_is_reported_against_eps():
    _, task, facts = started(FilaConfig(eps=1e3), ADAPTERS["lora"])
    assert facts["share_below_eps"] == 1.0 and facts["log10_eps"] == pytest.approx(3)
    levels = [facts[f"log10_retain_fisher_q{q}"] for q in (5, 50, 95)]
    assert levels == sorted(levels) and levels[2] < 3
    logged = {f"fila/{key}": value for key, value in facts.items()}
    assert task.telemetry.tracker.rows == {0: logged}
    assert started(FilaConfig(eps=1e-12), ADAPTERS["lora"])[2]["share_below_eps"] < 0.5


def test_the_start_follows_the_seed_and_nothing_else():
    one, two, other = (started(FilaConfig(), ADAPTERS["lora"], seed)[0] for seed in (1, 1, 2))
    pairs = zip(adapted_layers(one), adapted_layers(two), adapted_layers(other), strict=True)
    for (_, a), (_, b), (_, c) in pairs:
        assert torch.equal(a.A, b.A) and torch.equal(a.Bt, b.Bt)
        assert not torch.equal(a.A, c.A)
