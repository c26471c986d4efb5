"""Linear filtration, Newton removal, Kodge et al. and PGU: the weights that their formulas give,
derived anew from the papers; and golden losses of these and of JiT, NatMU, DUCK and GS-LoRA.

The golden losses guard ``MethodInfo.version``; where a change of numbers is meant, raise it and run

    SF_REGENERATE=1 python -m pytest tests/vision/test_class_methods.py -k golden
"""

from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods import head as head_module
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.head import conjugate_gradients
from stable_forgetting.common.methods.subspaces import core_space, importance
from tests.common.made import normal

GOLDEN = Path(__file__).parents[1] / "golden" / "class_methods.json"
VARIANTS = {
    "jit": {"steps": 6, "batch_size": 8, "samples": 4, "lr": 0.3},
    "natmu": {"epochs": 3, "batch_size": 16, "lr": 3e-3},
    "duck": {"steps": 6, "batch_size": 8, "lr": 3e-3},
    "linear_filtration": {},
    "newton_removal": {},
    "kodge": {"alpha_forget": 30.0},
    "pgu": {"steps": 6, "batch_size": 8, "lr": 0.3},
    "gs_lora": {"steps": 10, "batch_size": 8},
}


@pytest.fixture(scope="module")
def original(golden, golden_problem):
    with golden.float64():
        return golden_problem.original


@pytest.fixture
def unlearn(golden, golden_problem, original):
    """Runs a method in float64 from Original, or from another start."""

    def run(name, start=None, scenario="class", **params):
        with golden.float64():
            model = copy.deepcopy(start or original)
            task = golden_problem.task(model, scenario, 1, METHODS[name].info.access)
            return METHODS[name](resolve_config(name, None, params, origin="test")).unlearn(task)

    return run


@pytest.fixture
def part_of(golden_problem):
    def batch(*parts):
        split = golden_problem.split("class").parts
        indices = np.concatenate([split[part] for part in parts])
        return golden_problem.source().fetch(torch.as_tensor(indices))

    return batch


def layer_inputs(model, images):
    """Layer -> its inputs as columns, by hooks on outputs; a convolution's are its patches."""
    seen = {}

    def keep(name):
        def hook(module, args, output):
            x = args[0].detach()
            if isinstance(module, nn.Conv2d):  # the stem's patches do not overlap
                side = module.kernel_size[0]
                x = x.unfold(2, side, side).unfold(3, side, side)
                x = x.permute(0, 2, 3, 1, 4, 5).reshape(-1, module.weight[0].numel())
            seen[name] = x.reshape(-1, x.shape[-1]).T

        return hook

    kinds = (nn.Linear, nn.Conv2d)
    hooks = [
        module.register_forward_hook(keep(name))
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    with torch.no_grad():
        model.eval()(images)
    for hook in hooks:
        hook.remove()
    return seen


def features_of(model, images):
    with torch.no_grad():
        return model.forward_head(model.forward_features(images), pre_logits=True)


# Linear filtration -------------------------------------------------------------------------------


def mean_logits(model, batch):
    logits = model.eval()(batch.inputs["x"]).detach().numpy()
    return np.stack([logits[batch.labels.numpy() == c].mean(0) for c in range(4)], axis=1)


@pytest.mark.parametrize("kind", ["normalization", "zeroing", "naive"])
def test_linear_filtration_maps_the_head_as_in_the_paper(unlearn, original, part_of, kind):
    found = unlearn("linear_filtration", filtration=kind, margin=7.0)
    means, kept = mean_logits(original, part_of("forget", "retain")), [0, 2, 3]
    rows = means[kept]
    column = {
        "normalization": rows[:, 1] - rows[:, 1].mean() + rows[:, kept].mean(),
        "zeroing": np.zeros(3),
        "naive": rows[:, 1],
    }[kind]
    target = np.stack([rows[:, 0], column, rows[:, 2], rows[:, 3]], axis=1)
    mapped = target @ np.linalg.inv(means)
    head, ours = original.head, found.head
    weight, bias = mapped @ head.weight.detach().numpy(), mapped @ head.bias.detach().numpy()
    np.testing.assert_allclose(ours.weight.detach().numpy()[kept], weight, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(ours.bias.detach().numpy()[kept], bias, rtol=1e-6, atol=1e-9)
    every = part_of("forget", "retain", "test")
    logits = found.eval()(every.inputs["x"])
    assert float(logits.softmax(1)[:, 1].max().detach()) < np.exp(-7)
    after = mean_logits(found, part_of("forget", "retain"))[kept]
    np.testing.assert_allclose(after, target, rtol=1e-6, atol=1e-8)
    if kind == "naive":
        before = original.eval()(every.inputs["x"])
        torch.testing.assert_close(logits[:, kept], before[:, kept])


def test_linear_filtration_draws_a_random_column_of_the_runs_seed(unlearn, original, part_of):
    found = unlearn("linear_filtration", filtration="randomization")
    before, after = (mean_logits(m, part_of("forget", "retain")) for m in (original, found))
    kept = [0, 2, 3]
    np.testing.assert_allclose(after[np.ix_(kept, kept)], before[np.ix_(kept, kept)], rtol=1e-6)
    assert (
        np.abs(after[kept, 1] - before[kept, 1]).min() > 1e-3 and np.abs(after[kept, 1]).max() < 5
    )


def test_linear_filtration_leaves_a_class_without_a_sample(unlearn, original, monkeypatch):
    def without_the_last(task, indices):
        head, theta, features, labels = read(task, indices)
        return head, theta, features[labels < 3], labels[labels < 3]

    read = head_module._head
    monkeypatch.setattr(head_module, "_head", without_the_last)
    found = unlearn("linear_filtration").head.weight
    assert torch.equal(found[3], original.head.weight[3])
    assert not torch.isclose(found[:3], original.head.weight[:3]).all(1).any()


def test_linear_filtration_forgets_whole_classes_alone(unlearn):
    with pytest.raises(DataError, match="all are retained"):
        unlearn("linear_filtration", scenario="random")


# Newton removal ----------------------------------------------------------------------------------


def ridge_loss(theta, features, labels, l2):
    """The paper's L: summed cross-entropy and n l2 / 2 ||theta||^2, theta flat."""
    z = features @ theta.view(4, -1).T
    return F.cross_entropy(z, labels, reduction="sum") + len(z) * l2 / 2 * theta.square().sum()


def newton_parts(model, batch):
    features = features_of(model, batch.inputs["x"])
    return torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], 1)


def flat_head(model):
    head = model.head
    return torch.cat([head.weight, head.bias.unsqueeze(1)], 1).detach().flatten()


def test_newton_removal_is_the_papers_step(unlearn, original, part_of):
    found = unlearn("newton_removal", ridge=1e-3)
    forget, retain, theta = part_of("forget"), part_of("retain"), flat_head(original)
    kept, gone = newton_parts(original, retain), newton_parts(original, forget)
    l2 = 1e-3 * float(kept.square().sum(1).mean())
    start = theta.clone().requires_grad_()
    delta = torch.autograd.grad(ridge_loss(start, gone, forget.labels, l2), start)[0]
    hessian = torch.autograd.functional.hessian(
        lambda t: ridge_loss(t, kept, retain.labels, l2), theta
    )
    wanted = theta + torch.linalg.solve(hessian, delta)
    torch.testing.assert_close(flat_head(found), wanted, rtol=1e-6, atol=1e-8)
    others = [
        n for n, p in found.named_parameters() if not torch.equal(p, original.get_parameter(n))
    ]
    assert others == ["head.weight", "head.bias"]


def test_from_the_minimum_newton_removal_comes_close_to_the_minimum_without(
    unlearn, original, part_of
):
    start, both, retain = copy.deepcopy(original), part_of("forget", "retain"), part_of("retain")
    l2 = 0.05 * float(newton_parts(original, retain).square().sum(1).mean())

    def minimum(batch):
        theta, features = flat_head(original), newton_parts(original, batch)
        for _ in range(30):
            wanted = theta.clone().requires_grad_()
            loss = ridge_loss(wanted, features, batch.labels, l2)
            gradient = torch.autograd.grad(loss, wanted)[0]
            hessian = torch.autograd.functional.hessian(
                lambda t: ridge_loss(t, features, batch.labels, l2), theta
            )
            theta = theta - torch.linalg.solve(hessian, gradient)
        return theta

    first, last = minimum(both), minimum(retain)
    with torch.no_grad():
        start.head.weight.copy_(first.view(4, -1)[:, :-1])
        start.head.bias.copy_(first.view(4, -1)[:, -1])
    found = flat_head(unlearn("newton_removal", start, ridge=0.05))
    assert (found - last).norm() < 0.5 * (first - last).norm()


def test_conjugate_gradients_solve_what_is_positive_definite():
    root = normal(6, 6)
    matrix, target = root @ root.T + torch.eye(6), normal(6, seed=1)
    found = conjugate_gradients(lambda x: matrix @ x, target, 50)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, target))
    assert not conjugate_gradients(lambda x: matrix @ x, 0 * target, 50).any()


# Kodge et al. ------------------------------------------------------------------------------------


def test_kodge_projects_every_layer_by_the_svd_of_its_inputs(unlearn, original, part_of):
    found = unlearn("kodge", alpha_retain=30.0, alpha_forget=5.0)
    spaces = {}
    for part, alpha in (("forget", 5.0), ("retain", 30.0)):
        for name, columns in layer_inputs(original, part_of(part).inputs["x"]).items():
            u, s, _ = torch.linalg.svd(columns, full_matrices=False)
            share = s**2 / (s**2).sum()
            scale = torch.diag(alpha * share / ((alpha - 1) * share + 1))
            spaces[part, name] = u @ scale @ u.T
    names = {name for _, name in spaces}
    assert len(names) == 10 and "patch_embed.proj" in names
    for name in names:
        gone, kept = spaces["forget", name], spaces["retain", name]
        only_forget = gone - gone @ kept
        weight = original.get_submodule(name).weight.detach()
        wanted = weight.flatten(1) @ (torch.eye(len(gone)).double() - only_forget).T
        ours = found.get_submodule(name).weight.detach().flatten(1)
        torch.testing.assert_close(ours, wanted, rtol=1e-7, atol=1e-9)
    biases = [n for n, _ in found.named_parameters() if not n.endswith("weight") or "norm" in n]
    assert all(torch.equal(found.get_parameter(n), original.get_parameter(n)) for n in biases)


def test_kodge_changes_nothing_where_forget_has_no_direction(unlearn, original):
    found = unlearn("kodge", alpha_forget=1e-14)
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter, original.get_parameter(name), rtol=0, atol=1e-9)
    moment = normal(4, 9) @ normal(4, 9).T
    assert torch.linalg.eigvalsh(importance(moment, 1e9)).min() > 0.99
    torch.testing.assert_close(importance(moment, 1.0), moment / moment.trace())
    assert not importance(0 * moment, 3.0).any()


def test_a_spectrum_is_found_where_the_first_solver_gives_up(monkeypatch):
    moment = normal(4, 3) @ normal(4, 3).T
    values, vectors = tools.spectrum(moment)
    assert (values[:-1] >= values[1:]).all() and values[-1] < 1e-12
    torch.testing.assert_close(vectors * values @ vectors.T, moment)

    monkeypatch.setattr(torch.linalg, "eigh", Mock(side_effect=torch.linalg.LinAlgError))
    again, others = tools.spectrum(moment)
    torch.testing.assert_close(again, values)
    torch.testing.assert_close(others * again @ others.T, moment)


# PGU ---------------------------------------------------------------------------------------------


def test_pgus_loss_is_bounded_and_rewards_entropy():
    z = (2 * normal(5, 4)).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3, 0])
    ours = tools.less_certain(z, labels, 0.05, 0.2).mean()
    p = z.softmax(1)
    own = p[torch.arange(5), labels]
    wanted = (-torch.log(1 - (own - 0.05)) + 0.2 * (p * p.log()).sum(1)).mean()
    torch.testing.assert_close(ours, wanted)
    got, other = (torch.autograd.grad(x, z, retain_graph=True)[0] for x in (ours, wanted))
    torch.testing.assert_close(got, other)
    sure = torch.tensor([[900.0, 0.0]])
    assert torch.isfinite(tools.less_certain(sure, torch.tensor([0]), 0.05, 0.2)).all()


def test_pgus_step_is_the_gradient_off_the_retain_space(
    unlearn, original, part_of, golden, golden_problem
):
    settings = {"offset": 0.05, "entropy_weight": 0.2, "retained": 0.9}
    found = unlearn("pgu", steps=1, batch_size=64, lr=0.3, **settings)
    model = copy.deepcopy(original).eval()
    with golden.float64():
        task = golden_problem.task(model, "class", 1, METHODS["pgu"].info.access)
        batch = task.loader("forget", batch_size=64).next()  # the one that it was trained on
    p = model(batch.inputs["x"]).softmax(1)
    own = p[torch.arange(len(p)), batch.labels]
    (-torch.log(1.05 - own) + 0.2 * (p * p.log()).sum(1)).mean().backward()
    inputs = layer_inputs(original, part_of("retain").inputs["x"])
    for name, columns in inputs.items():
        u, s, _ = torch.linalg.svd(columns, full_matrices=False)
        held, k = 0.0, 0
        while held <= 0.9 * float(s.sum()):
            held, k = held + float(s[k]), k + 1
        weight = model.get_submodule(name).weight
        gradient = weight.grad.flatten(1)
        step = (found.get_submodule(name).weight - weight).detach().flatten(1) / -0.3
        wanted = gradient - gradient @ u[:, :k] @ u[:, :k].T
        assert 0 < k < len(u) and wanted.norm() > 1e-9
        torch.testing.assert_close(step, wanted, rtol=1e-7, atol=1e-12)
    kept = [n for n, _ in found.named_parameters() if n.removesuffix(".weight") not in inputs]
    assert kept and all(
        torch.equal(found.get_parameter(n), original.get_parameter(n)) for n in kept
    )


def test_the_core_space_is_the_smallest_that_holds_more_than_the_share():
    roots = torch.tensor([5.0, 3.0, 1.0, 1.0])
    moment = torch.diag(roots**2)
    assert [core_space(moment, share).shape[1] for share in (0.3, 0.5, 0.79, 0.8, 0.95)] == [
        *(1, 2, 2, 3, 4)
    ]
    assert torch.equal(core_space(moment, 0.79).abs().sum(1), torch.tensor([1.0, 1, 0, 0]))


# All of them -------------------------------------------------------------------------------------


@pytest.fixture
def found(unlearn, original, golden_problem, losses):
    models = {"original": original} | {n: unlearn(n, **params) for n, params in VARIANTS.items()}
    return {name: losses(golden_problem, model) for name, model in models.items()}


def test_golden_losses(found, check_golden):
    check_golden(GOLDEN, found)
    for name in VARIANTS:
        rise = {part: found[name][part] - found["original"][part] for part in ("forget", "retain")}
        assert rise["forget"] > max(0.01, rise["retain"]), (name, rise)


def test_no_two_methods_are_the_same(golden_twins):
    assert golden_twins(GOLDEN) == set()
