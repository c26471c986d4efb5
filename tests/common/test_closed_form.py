"""Fast-NTK, influence unlearning and Fisher forgetting against the algebra that they stand for."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stable_forgetting.common.base.errors import ConfigError, Diverged
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import trainable_share
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.batch import Batch, forgotten_classes, unretained_classes
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.fast_ntk import FastNTK, ridge_solution, separate
from stable_forgetting.common.methods.fisher import lineage_recursion, woodbury
from stable_forgetting.common.methods.tools.gradients import SampleGradients
from stable_forgetting.common.objectives.positions import sample_cross_entropy

BOTH = frozenset({"forget", "retain"})


class DoubleSource:
    """The tiny source in float64."""

    def __init__(self, source):
        self.source = source
        self.digest = source.digest

    def fetch(self, indices, *, augment=None):
        batch = self.source.fetch(indices, augment=augment)
        return Batch({"x": batch.inputs["x"].double()}, batch.labels, batch.indices)


@pytest.fixture
def task_of(tiny):
    def build(name, model=None, **changes):
        source = tiny.Source(noise=1.0)
        model = model or tiny.net(1)
        task = tiny.task(source, tiny.split(source), access=METHODS[name].info.access, model=model)
        for name, value in changes.items():
            setattr(task, name, value)
        return task

    return build


def everything(task, *parts):
    return task.source.fetch(torch.as_tensor(task.indices(*parts)))


# -- the gradients themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fisher", "influence", "fast_ntk"])
def test_sums_of_low_precision_gradients_are_float32(tiny, task_of, name):
    """A sum of 600 in bfloat16 stops at 256."""

    def forward(model, batch):
        return model(batch.inputs["x"].bfloat16())

    task = task_of(name, tiny.net(1).bfloat16(), family=tiny.family(forward=forward))
    gradients = SampleGradients(SimpleNamespace(model=task.model, forward=forward))
    one = gradients.mean(task.source, np.zeros(1, int), 1)
    many = gradients.mean(task.source, np.zeros(600, int), 1)
    assert many.dtype == torch.float32
    torch.testing.assert_close(many, one, rtol=1e-4, atol=0)
    METHODS[name](METHODS[name].Config()).unlearn(task)
    assert {p.dtype for p in task.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_single_gradients_are_those_of_one_backward_each(tiny, task_of, chunk):
    task = task_of("influence")
    gradients = SampleGradients(task, ("blocks.1.*", "head.bias"), chunk=chunk)
    batch = everything(task, "forget")
    found = torch.cat(list(gradients.losses(batch)))
    chosen = list(gradients.parameters.values())
    for row, start in zip(found, range(len(batch)), strict=True):
        one = batch.slice(start, start + 1)
        loss = sample_cross_entropy(tiny.forward(task.model, one), one.labels).sum()
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, chosen)])
        torch.testing.assert_close(row, wanted, atol=1e-6, rtol=1e-4)
    mean = gradients.mean(task.source, task.indices("forget"), 5)
    torch.testing.assert_close(mean, found.mean(0), atol=1e-6, rtol=1e-4)


def test_jacobians_hold_the_logits_that_were_asked_for(tiny, task_of):
    task = task_of("fast_ntk")
    gradients = SampleGradients(task, ("head.*",), chunk=4)
    batch = everything(task, "forget")
    wanted = torch.tensor([[2, 0]]).expand(len(batch), 2)
    found = torch.cat(list(gradients.jacobians(batch, wanted)))
    assert found.shape == (len(batch), 2, 4 * 8 + 4)
    bias = found[:, :, 32:]
    assert torch.equal(bias, F.one_hot(wanted, 4).float())


def test_a_pattern_without_parameters_is_refused(tiny, task_of):
    with pytest.raises(ConfigError, match="none of this model matches"):
        SampleGradients(SimpleNamespace(model=tiny.net(), forward=tiny.forward), ("blocks.9.*",))
    method = FastNTK(FastNTK.Config(parameters=("nothing",)))
    with pytest.raises(ConfigError, match="matches nothing"):
        method.unlearn(task_of("fast_ntk"))


def test_a_step_that_is_not_finite_diverges(tiny):
    gradients = SampleGradients(SimpleNamespace(model=tiny.net(), forward=tiny.forward))
    with pytest.raises(Diverged):
        gradients.write(gradients.flat() * float("nan"))


def test_classes_are_forgotten_only_if_none_is_retained(tiny):
    source = tiny.Source()
    split = tiny.split(source)
    forget, retain = split.parts["forget"], split.parts["retain"]
    assert forgotten_classes(source, forget, retain) == [1]
    assert forgotten_classes(source, forget, np.append(retain, forget[0])) == []
    assert unretained_classes(source, (1, 2, 9), retain) == [1, 9]


# -- Fast-NTK -------------------------------------------------------------------------------------


def linear_ridge(x, labels, mu):
    """Weights (C, 7) of a linear classifier with bias: ridge regression on centred one-hots."""
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    gram = inputs.T @ inputs + mu * torch.eye(7, dtype=x.dtype)
    return torch.linalg.solve(gram, inputs.T @ (F.one_hot(labels, 4).double() - 0.25)).T


@pytest.mark.parametrize("samples", [48, 12])
def test_fast_ntk_on_a_linear_model_is_exact_retraining(tiny, samples):
    """To 1e-10, by the parameters' system (28 unknowns) and, with 12 samples, also from few."""
    source = tiny.Source(noise=1.0)
    split = tiny.split(source)
    model = nn.Linear(6, 4).double()
    task = tiny.task(DoubleSource(source), split, access=BOTH, model=model)
    task = dataclasses.replace(task, family=tiny.family(head=("*",)))
    method = FastNTK(FastNTK.Config(samples=samples, label_scale=1.0, ridge=1e-2))
    forget, retain = method._draw(task)
    assert len(forget) + len(retain) == samples and len(forget) == samples // 4
    data = task.source.fetch(torch.as_tensor(np.concatenate([forget, retain])))
    x = data.inputs["x"]
    mu = 1e-2 * float((x.square().sum(1) + 1).mean())
    start = linear_ridge(x, data.labels, mu)
    with torch.no_grad():
        model.weight.copy_(start[:, :6])
        model.bias.copy_(start[:, 6])
    kept = task.source.fetch(torch.as_tensor(retain))
    wanted = linear_ridge(kept.inputs["x"], kept.labels, mu)
    assert (wanted - start).abs().max() > 1e-2  # forgetting changes something
    method.unlearn(task)
    assert (model.weight - wanted[:, :6]).abs().max() < 1e-10
    assert (model.bias - wanted[:, 6]).abs().max() < 1e-10


def test_fast_ntk_is_the_block_formula_of_the_paper():
    """w - s (J_f^T - J_r^T K_rr^-1 K_fr^T) beta, with the Schur complement, in both systems."""
    stream = torch.Generator().manual_seed(0)
    for rows_f, rows_r, size in ((6, 10, 40), (12, 30, 8)):
        j_f = torch.randn(rows_f, size, generator=stream, dtype=torch.float64)
        j_r = torch.randn(rows_r, size, generator=stream, dtype=torch.float64)
        e_f = torch.randn(rows_f, generator=stream, dtype=torch.float64)
        e_r = torch.randn(rows_r, generator=stream, dtype=torch.float64)
        k_rr = j_r @ j_r.T + 0.1 * torch.eye(rows_r)
        k_ff = j_f @ j_f.T + 0.1 * torch.eye(rows_f)
        k_fr = j_f @ j_r.T
        schur = k_ff - k_fr @ torch.linalg.solve(k_rr, k_fr.T)
        beta = torch.linalg.solve(schur, e_f - k_fr @ torch.linalg.solve(k_rr, e_r))
        step = (j_f.T - j_r.T @ torch.linalg.solve(k_rr, k_fr.T)) @ beta
        both = ridge_solution(torch.cat([j_f, j_r]), torch.cat([e_f, e_r]), 0.1)
        assert (both - ridge_solution(j_r, e_r, 0.1) - step).abs().max() < 1e-10


def test_a_classifier_falls_apart_into_one_system_per_class():
    """Rows (sample, class) of a linear head touch the class's own weights only."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(30, 6, generator=stream, dtype=torch.float64)
    outputs = torch.stack([torch.randperm(4, generator=stream)[:3] for _ in range(30)])
    rows = (
        (F.one_hot(outputs, 4).double().unsqueeze(-1) * x[:, None, None]).flatten(2).flatten(0, 1)
    )
    residual = torch.randn(90, generator=stream, dtype=torch.float64)
    parts = separate(rows, outputs.flatten())
    assert parts is not None and [len(columns) for _, columns in parts] == [6] * 4
    together = ridge_solution(rows, residual, 0.1)
    assert (ridge_solution(rows, residual, 0.1, outputs.flatten()) - together).abs().max() < 1e-12
    shared = torch.cat([rows, torch.ones(90, 1, dtype=torch.float64)], dim=1)  # one more column
    assert separate(shared, outputs.flatten()) is None
    joint = ridge_solution(shared, residual, 0.1)
    assert torch.equal(ridge_solution(shared, residual, 0.1, outputs.flatten()), joint)


def test_fast_ntk_takes_the_true_class_first_and_a_subset_of_classes(task_of):
    task = task_of("fast_ntk")
    method = FastNTK(FastNTK.Config(classes=2))
    labels = torch.tensor([3, 0, 1, 2, 3])
    chosen = method._outputs(labels, 4, torch.Generator().manual_seed(0))
    assert chosen.shape == (5, 2) and torch.equal(chosen[:, 0], labels)
    assert (chosen[:, 1] != labels).all()
    before = task.model.head.weight.clone()
    method.unlearn(task)
    assert not torch.equal(task.model.head.weight, before)


# -- influence unlearning -------------------------------------------------------------------------


def test_woodbury_is_the_inverse():
    stream = torch.Generator().manual_seed(1)
    singles = torch.randn(7, 20, generator=stream, dtype=torch.float64)
    v = torch.randn(20, generator=stream, dtype=torch.float64)
    fisher = 0.3 * torch.eye(20) + singles.T @ singles / 7
    torch.testing.assert_close(woodbury(v, singles, 0.3), torch.linalg.solve(fisher, v))


def test_the_lineages_recursion_corrects_along_its_first_gradient_only():
    """Their ``o`` is scaled, never turned: what it gives is v - c g_1 whatever the other g are."""
    stream = torch.Generator().manual_seed(2)
    singles = torch.randn(9, 20, generator=stream, dtype=torch.float64)
    v = torch.randn(20, generator=stream, dtype=torch.float64)
    moved = lineage_recursion(v, singles, 1.0) - v
    cosine = F.cosine_similarity(moved, singles[0], dim=0)
    assert abs(abs(float(cosine)) - 1) < 1e-12
    exact = woodbury(v, singles, 1.0) - v
    assert abs(float(F.cosine_similarity(exact, singles[0], dim=0))) < 0.9


def test_influence_takes_the_retain_gradient_from_retain_data(tiny, task_of):
    """The lineage's ImageNet path loops over the forget loader for both gradients."""
    task = task_of("influence")
    config = METHODS["influence"].Config(alpha=2.0, samples=5, damping=0.5, batch_size=7)
    method = METHODS["influence"](config)
    gradients = SampleGradients(task)
    means = {}
    for part in ("forget", "retain"):
        batch = everything(task, part)
        means[part] = torch.cat(list(gradients.losses(batch))).mean(0)
    singles = method._retain_gradients(task, gradients)
    labels = task.raw.labels[task.raw.log[-1]]
    assert len(singles) == 5 and 1 not in labels.tolist()
    n_f, n_r = (len(task.indices(part)) for part in ("forget", "retain"))
    v = n_f / (n_f + n_r) * (means["forget"] - means["retain"])
    wanted = gradients.flat() + 2.0 * woodbury(v, singles, 0.5)
    method.unlearn(task)
    torch.testing.assert_close(gradients.flat(), wanted, atol=1e-6, rtol=1e-4)


def test_a_mean_gradient_leaves_frozen_parameters_out_and_frozen(task_of):
    task = task_of("influence")
    whole = SampleGradients(task).mean(task.source, task.indices("forget"), 16)
    frozen = next(task.model.parameters())
    frozen.requires_grad_(False)
    rest = SampleGradients(task).mean(task.source, task.indices("forget"), 16)
    assert torch.equal(rest, whole[frozen.numel() :]) and not frozen.requires_grad


# -- Fisher forgetting ----------------------------------------------------------------------------


def public_variance(fisher, given, *, head):
    """What Golatkar's notebook, SalUn's and SSD's repository make of a diagonal, class 1 gone."""
    value = (1 / (fisher + 1e-8)).clamp(max=min(50.0, 20.0 if head else 50.0)) * given["alpha"]
    if fisher.ndim > 1:
        value = value.mean(1, keepdim=True).expand(fisher.shape).clone()
    if head:
        value[1] = 1e-4
    return value * (10 if head or fisher.ndim == 1 else 1)


def paper_variance(fisher, given, *, head):
    """Noise with F^-1/4, so variance with F^-1/2; no caps, no classifier of its own."""
    return given["alpha"] / (fisher + 1e-8).sqrt()


@pytest.mark.parametrize("preset", [None, "paper"])
@pytest.mark.parametrize("kind", ["expected", "empirical"])
def test_fisher_noise_has_the_variance_that_it_claims(tiny, task_of, kind, preset):
    task = task_of("fisher")
    given = {"fisher": kind, "alpha": 1e-4, "samples": 10_000}
    caps = {} if preset else {"cap": 50.0, "head_cap": 20.0}
    expected = paper_variance if preset else public_variance
    config = resolve_config("fisher", preset, {**given, **caps}, origin="test")
    method = METHODS["fisher"](config)
    model = task.model
    batch = everything(task, "retain")
    names = [name for name, _ in model.named_parameters()]
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(batch)):
        one = batch.slice(i, i + 1)
        p = tiny.forward(model.eval(), one).softmax(-1)[0].detach()
        for label in range(4) if kind == "expected" else [int(one.labels)]:
            logits = tiny.forward(model, one)
            loss = F.cross_entropy(logits, torch.tensor([label]))
            weight = p[label] if kind == "expected" else 1.0
            for name, g in zip(names, torch.autograd.grad(loss, model.parameters()), strict=True):
                fisher[name] += weight * g.square() / len(batch)
    gradients = SampleGradients(SimpleNamespace(model=model, forward=tiny.forward))
    found = method._diagonal(task, gradients)
    wanted = torch.cat([value.flatten() for value in fisher.values()])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    method.unlearn(task)
    ratios = {"head": [], "rest": []}
    for name, p in model.named_parameters():
        variance = expected(fisher[name], given, head=name.startswith("head"))
        start = before[name].clone()
        if name.startswith("head") and not preset:
            start[1] = 0  # class 1 is forgotten as a whole
        group = "head" if name.startswith("head") else "rest"
        ratios[group].append(((p.detach() - start) / variance.sqrt()).flatten())
    for group, values in ratios.items():
        z = torch.cat(values)
        slack = 4 / (2 * len(z)) ** 0.5
        assert abs(float(z.std()) - 1) < slack and abs(float(z.mean())) < 2 * slack, group


def test_fast_ntk_trains_what_it_moves_alone(task_of):
    task = task_of("fast_ntk")
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    model = METHODS["fast_ntk"](METHODS["fast_ntk"].Config(samples=16)).unlearn(task)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith("head"), name
        assert parameter.requires_grad or torch.equal(parameter, before[name]), name
    trained, base = trainable_share(model)
    assert trained == sum(p.numel() for p in model.head.parameters()) < base / 2


def test_fisher_leaves_the_head_of_a_random_request(tiny, task_of):
    source = tiny.Source(noise=1.0)
    split = tiny.split(source)
    parts = dict(split.parts)
    parts["forget"], parts["retain"] = parts["retain"][:6], parts["retain"][6:]
    data = DataAccess(source, dataclasses.replace(split, parts=parts), BOTH)
    task = task_of("fisher", data=data)
    before = task.model.head.weight.detach().clone()
    METHODS["fisher"](METHODS["fisher"].Config(alpha=1e-12)).unlearn(task)
    assert (task.model.head.weight - before).abs().max() < 1e-3
