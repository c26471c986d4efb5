"""Methods of importance and of noise against their formulas; test_newer_methods.py has golden
losses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import IGNORE, Batch
from stable_forgetting.common.methods import noisy, tools
from stable_forgetting.common.methods.base import resolve_config

EVERY = 64
"""Samples per batch: all of them."""


@pytest.fixture(scope="module")
def problem(tiny, golden, baseline):
    """Source, split and a trained net, in float64, without dropout."""
    with golden.float64():
        source = golden.source(1.0)
        split = tiny.split(source)
        build = lambda: golden.set_(tiny.net(1).double())  # noqa: E731
        return source, split, baseline.original(source, split, build=build)


@pytest.fixture
def run(tiny, golden, baseline, problem):
    """(name, params, options of a task) -> the unlearned model."""
    source, split, original = problem

    def go(name, params, **options):
        cls = METHODS[name]
        config = resolve_config(name, None, params, origin="test")
        fields = {"model": copy.deepcopy(original), "recipe": baseline.recipe, **options}
        with golden.float64():
            task = tiny.task(source, split, access=cls.info.access, **fields)
            return cls(config).unlearn(task)

    return go


def of_part(problem, *parts):
    source, split, _ = problem
    return source.fetch(torch.cat([torch.as_tensor(split.parts[part]) for part in parts]))


def gradients_of(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def length(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).norm()


# Importance --------------------------------------------------------------------------------------


def test_lfssds_loss_is_the_squared_norm_of_the_logits_where_a_label_is():
    z = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z.requires_grad_()
    labels = torch.tensor([[0, IGNORE, 1], [2, IGNORE, IGNORE]])
    found = tools.squared_norm(z, Batch({}, labels, torch.arange(2)))
    first = (z[0, 0].norm() ** 2 + z[0, 2].norm() ** 2) / 2
    wanted = (first + z[1, 0].norm() ** 2) / 2
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(loss, z)[0] for loss in (found, wanted)))


def test_lfssd_dampens_by_the_gradient_of_the_squared_norm(tiny, problem, run):
    original = copy.deepcopy(problem[2]).eval()
    importance = []
    for parts in (("forget",), ("forget", "retain")):  # the two lines of the source's README
        out = original(of_part(problem, *parts).inputs["x"])
        loss = torch.norm(out, p="fro", dim=1).pow(2).mean()
        importance.append({k: g.abs() for k, g in gradients_of(original, loss).items()})
    found = dict(run("lfssd", {"alpha": 1.5, "lam": 0.8, "batch_size": EVERY}).named_parameters())
    moved = 0
    for name, weight in original.named_parameters():
        mine, all_ = (values[name] for values in importance)
        wanted = weight * torch.where(mine > 1.5 * all_, (0.8 * all_ / mine).clamp(max=1), 1.0)
        torch.testing.assert_close(found[name], wanted)
        moved += int((mine > 1.5 * all_).sum())
    assert moved > 0
    assert tiny.same(run("lfssd", {"alpha": 1e9}), problem[2])


def test_wagle_trains_the_weights_of_the_largest_published_score(problem, run):
    original = copy.deepcopy(problem[2]).eval()
    g = {}
    for part in ("forget", "retain"):
        batch = of_part(problem, part)
        loss = F.cross_entropy(original(batch.inputs["x"]), batch.labels)
        g[part] = gradients_of(original, loss)
    before = dict(original.named_parameters())
    scores = {
        name: ((weight - g["retain"][name] / 0.5) * g["forget"][name]).abs()
        for name, weight in before.items()
    }
    ranked = torch.cat([score.flatten() for score in scores.values()]).sort(descending=True).values
    least = ranked[round(0.3 * len(ranked)) - 1]
    given = {"density": 0.3, "gamma": 0.5, "score_batch_size": EVERY, "steps": 4, "lr": 1e-2}
    after = dict(run("wagle", {**given, "weight_decay": 0.1}).named_parameters())
    for name, score in scores.items():
        assert torch.equal(after[name] != before[name], score >= least)


def test_wagle_on_all_weights_is_gradient_difference(tiny, run):
    given = {"steps": 4, "lr": 1e-2, "batch_size": 8}
    assert tiny.same(run("wagle", {**given, "density": 1.0}), run("gd", given))


def test_prune_first_keeps_the_pattern_of_global_magnitude_pruning(problem, run):
    reference = copy.deepcopy(problem[2])
    layers = [m for m in reference.modules() if isinstance(m, torch.nn.Linear)]
    prune.global_unstructured(
        [(layer, "weight") for layer in layers], pruning_method=prune.L1Unstructured, amount=0.6
    )
    given = {"sparsity": 0.6, "steps": 5, "lr": 1e-2, "weight_decay": 0.1}
    found = run("prune_first", given)
    pruned = [m for m in found.modules() if isinstance(m, torch.nn.Linear)]
    for layer, wanted in zip(pruned, layers, strict=True):
        assert torch.equal(layer.weight != 0, wanted.weight_mask.bool())
        assert not torch.equal(layer.weight, wanted.weight) and (layer.bias != 0).all()


def test_prune_first_without_pruning_is_fine_tuning(tiny, run):
    given = {"steps": 4, "lr": 1e-2, "batch_size": 8}
    assert tiny.same(run("prune_first", {**given, "sparsity": 0.0}), run("finetune", given))


def test_prune_first_leaves_a_frozen_layer_as_it_was_pruned(problem, run):
    model = copy.deepcopy(problem[2])
    name = next(name for name, weight in model.named_parameters() if weight.ndim == 2)
    model.get_parameter(name).requires_grad_(False)
    before = model.get_parameter(name).detach().clone()
    found = run("prune_first", {"sparsity": 0.6, "steps": 3}, model=model).get_parameter(name)
    assert 0 < int((found == 0).sum()) < found.numel()
    assert torch.equal(found[found != 0], before[found != 0])


def test_an_embedding_is_not_pruned(tiny):
    model = tiny.net(1)
    model.register_module("table", torch.nn.Embedding(5, 3))
    with torch.no_grad():
        model.table.weight.mul_(1e-6)
    table = model.table.weight.detach().clone()
    config = resolve_config("prune_first", None, {"steps": 1, "sparsity": 0.9}, origin="test")
    source = tiny.Source()
    task = tiny.task(source, tiny.split(source), access=frozenset({"retain"}), model=model)
    assert torch.equal(METHODS["prune_first"](config).unlearn(task).table.weight, table)


# Noise -------------------------------------------------------------------------------------------


def test_undo_shrinks_every_weight_and_adds_xavier_noise_to_matrices(tiny):
    model = tiny.net(1)
    model.register_module("wide", torch.nn.Linear(300, 200))
    before = dict(copy.deepcopy(model).named_parameters())
    config = resolve_config("undo", None, {"alpha": 0.4, "beta": 0.3}, origin="test")
    source = tiny.Source()
    METHODS["undo"](config)._perturb(tiny.task(source, tiny.split(source), model=model))
    for name, after in model.named_parameters():
        rest = after - 0.6 * before[name]
        if after.ndim == 1:
            torch.testing.assert_close(rest, torch.zeros_like(rest), rtol=0, atol=1e-6)
            continue
        bound = 0.4 * 0.3 * (6 / (after.shape[0] + after.shape[1])) ** 0.5
        assert 0.8 * bound < rest.abs().max() <= bound + 1e-6
    spread = (model.wide.weight - 0.6 * before["wide.weight"]).detach().std()
    assert float(spread) == pytest.approx(0.4 * 0.3 * (2 / 500) ** 0.5, rel=0.02)


def test_undo_without_noise_is_the_unlearned_model(run):
    given = {"batch_size": 8, "forget_weight": 0.1, "optimizer": "sgd"}
    undone = run("undo", {**given, "steps": 8, "alpha": 0.0, "unlearn_lr": 0.1})
    short = run("gd", {**given, "steps": 2, "lr": 0.1})
    for one, two in zip(undone.parameters(), short.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_undo_distils_what_the_unlearned_model_says(problem, run):
    given = {"unlearn_lr": 1e-2, "alpha": 0.6, "batch_size": 16, "forget_weight": 1.0}
    taught = run("gd", {"steps": 10, "lr": 1e-2, "batch_size": 16, "forget_weight": 1.0})
    batch = of_part(problem, "forget", "retain")

    def distance(**more):
        model = run("undo", {**given, **more})
        p, q = (m.eval()(batch.inputs["x"]).log_softmax(-1) for m in (taught, model))
        return float((p.exp() * (p - q)).sum(-1).mean().detach())

    near = distance(steps=110, unlearn_share=10 / 110, lr=1e-2)
    assert near < 0.2 * distance(steps=11, unlearn_share=10 / 11, lr=1e-9)


def test_langevin_without_noise_is_fine_tuning_by_sgd(tiny, run):
    given = {"steps": 4, "lr": 1e-2, "batch_size": 8, "max_grad_norm": 1.0, "optimizer": "sgd"}
    assert tiny.same(
        run("langevin", {**given, "sigma": 0.0, "radius": 9.0}), run("finetune", given)
    )


def test_langevins_noise_has_the_published_size_and_the_ball_holds(problem, run):
    given = {"steps": 1, "lr": 1e-4, "batch_size": 8, "sigma": 3.0}
    found = run("langevin", {**given, "radius": 99.0})
    pairs = list(zip(found.parameters(), problem[2].parameters(), strict=True))
    moved = torch.cat([(a - b).detach().flatten() for a, b in pairs])
    assert float(moved.std()) == pytest.approx(3.0 * (2 * 1e-4) ** 0.5, rel=0.1)
    held = run("langevin", {**given, "radius": 0.5})
    torch.testing.assert_close(length(held), 0.5 * length(problem[2]))
    factor = 0.5 * length(problem[2]) / length(found)
    for one, two in zip(held.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, factor * two)


def test_the_length_of_weights_in_bfloat16_is_not_rounded_to_it():
    weight = torch.linspace(0, 1, 999).bfloat16()
    assert float(noisy.length([weight])) == pytest.approx(float(weight.double().norm()), rel=1e-6)


@pytest.mark.parametrize("name", ["wagle", "prune_first", "undo", "langevin"])
def test_killed_methods_resume_bit_for_bit(run, baseline, tmp_path, name):
    params = {"steps": 20, "batch_size": 8, "checkpoint_every": 4}
    assert baseline.resumes(lambda **options: run(name, params, **options), tmp_path)
