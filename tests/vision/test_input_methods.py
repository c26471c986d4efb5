"""JiT, NatMU, DUCK and GS-LoRA: their formulas by value and gradient, derived from the papers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.errors import AccessError, ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.checks.tiny_task import problem_of
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.gs_lora import group_norms
from stable_forgetting.common.methods.tools.layers import matrix_layers, rows_of
from stable_forgetting.common.train.protocols import Telemetry
from stable_forgetting.vision.methods.adversarial import Smoothness
from stable_forgetting.vision.methods.blends import Blends, masks
from stable_forgetting.vision.methods.centres import Centres, nearest
from stable_forgetting.vision.methods.contrast import HeadInputs
from tests.common.made import normal
from tests.common.train.trained import kill_at, resumed


@pytest.fixture
def small():
    """A layer and a head in float64, and batches of both parts."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=seed))
    labels = torch.arange(5) % 4
    forget, retain = (
        Batch({"x": normal(5, 6, seed=seed)}, labels, 10 * torch.arange(5)) for seed in (7, 8)
    )
    return model, {"forget": forget, "retain": retain}


def assert_same_gradients(ours, theirs, model):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    parameters = [*model.parameters()]
    got, wanted = (
        torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for loss in (ours, theirs)
    )
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def problem():
    return problem_of("vision")


def task_of(problem, name, scenario="class"):
    model = copy.deepcopy(problem.original)
    return problem.task(model, scenario, 1, METHODS[name].info.access)


# JiT ---------------------------------------------------------------------------------------------


def test_jit_is_the_mean_ratio_of_distances_with_noisy_outputs_fixed(small):
    model, batches = small
    x = batches["forget"].inputs["x"]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        ours = Smoothness(2, 0.4)(lambda batch: model(batch.inputs["x"]), batches).total
        torch.manual_seed(3)
        draws = [0.4 * torch.randn(5, 6, dtype=torch.float64) for _ in range(2)]
    total = 0.0
    for sample in range(5):
        for draw in draws:
            moved = torch.clamp(x[sample] + draw[sample], float(x.min()), float(x.max()))
            with torch.no_grad():
                other = model(moved)
            rise = (model(x[sample]) - other).square().sum().sqrt()
            total = total + rise / (moved - x[sample]).square().sum().sqrt()
    assert_same_gradients(ours, total / 10, model)


def test_jit_has_nothing_to_do_where_the_model_is_flat(small):
    model, batches = small
    with torch.no_grad():
        model[0].weight.zero_()
    value = Smoothness(2, 0.4)(lambda batch: model(batch.inputs["x"]), batches).total
    assert value == 0
    gradients = torch.autograd.grad(value, [*model.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_jit_cannot_read_retain_data(problem):
    with pytest.raises(AccessError):
        task_of(problem, "jit").indices("retain")


# NatMU -------------------------------------------------------------------------------------------


def test_natmus_masks_rise_to_the_middle_or_fall_to_it():
    tent = torch.tensor([0, 0.25, 0.5, 0.75, 0.75, 0.5, 0.25, 0])
    valley = torch.tensor([0.75, 0.5, 0.25, 0, 0, 0.25, 0.5, 0.75])
    found = masks(8, 8, 0.0)
    assert found.shape == (4, 1, 8, 8)
    for kind, line in ((0, tent), (1, tent), (2, valley), (3, valley)):
        across = kind % 2 == 1
        wanted = line.expand(8, 8) if across else line.view(8, 1).expand(8, 8)
        assert torch.equal(found[kind, 0], wanted)
    assert torch.equal(masks(8, 8, -0.3), (found - 0.3).clamp(0, 1))
    assert masks(5, 8, 0.0).shape == (4, 1, 5, 8)


@pytest.mark.parametrize("scenario", ["class", "random"])
def test_natmu_blends_images_of_the_classes_that_original_ranks_next(problem, scenario):
    task = task_of(problem, "natmu", scenario)
    blends = Blends.drawn(task, -0.19)
    forget, retain = task.indices("forget"), task.indices("retain")
    known = set(problem.source().labels_of(retain).tolist())
    batch = blends.fetch(-1 - torch.arange(len(blends)))
    weights = masks(16, 16, -0.19)
    place = 0
    for index in forget.tolist():
        own = problem.source().fetch(torch.tensor([index]))
        ranks = problem.original(own.inputs["x"])[0].argsort(descending=True).tolist()
        classes = [c for c in ranks if c in known and c != int(own.labels)][:4]
        for kind, label in enumerate(classes):
            assert int(blends.first[place]) == index and int(batch.labels[place]) == label
            second = blends.second[place]
            assert int(second) in retain.tolist()
            other = problem.source().fetch(second.view(1)).inputs["x"][0]
            wanted = weights[kind] * own.inputs["x"][0] + (1 - weights[kind]) * other
            torch.testing.assert_close(batch.inputs["x"][place], wanted)
            place += 1
    assert place == len(blends)


def test_natmu_keeps_the_order_of_a_mixed_batch(problem):
    task = task_of(problem, "natmu")
    blends = Blends.drawn(task, -0.19)
    retain = task.indices("retain")
    wanted = torch.tensor([int(retain[3]), -2, int(retain[0]), -5])
    batch = blends.fetch(wanted)
    for place, index in enumerate(wanted):
        alone = blends.fetch(index.view(1))
        assert torch.equal(batch.inputs["x"][place], alone.inputs["x"][0])
        assert batch.labels[place] == alone.labels[0]


# DUCK --------------------------------------------------------------------------------------------


def test_duck_is_the_cosine_distance_to_a_centre_and_tempered_cross_entropy(small):
    model, batches = small
    goals, watcher = normal(7, 5, seed=4), HeadInputs()
    members = torch.tensor([0, 5, 10, 20, 30, 35, 40])
    objective = Centres(watcher, members, goals, 1.5, 1.4, 2.0)
    with watcher.watching(model, ("2.*",)):
        ours = objective(lambda batch: model(batch.inputs["x"]), batches).total
    chosen = goals[[0, 2, 3, 4, 6]]  # of samples 0, 10, 20, 30, 40
    h = torch.tanh(model[0](batches["forget"].inputs["x"]))
    cosines = (h * chosen).sum(1) / (h.square().sum(1) * chosen.square().sum(1)).sqrt()
    z = model(batches["retain"].inputs["x"]) / 2
    kept = -z.log_softmax(1)[torch.arange(5), batches["retain"].labels].mean()
    assert_same_gradients(ours, 1.5 * (1 - cosines).mean() + 1.4 * kept, model)


def test_ducks_centre_is_the_nearest_by_angle_of_those_allowed():
    centres = torch.tensor([[1.0, 0.0], [0.0, 9.0], [5.0, 5.0]])
    features = torch.tensor([[3.0, 0.1], [3.0, 0.1], [0.0, 1.0]])
    barred = torch.tensor([[False] * 3, [True, False, False], [False] * 3])
    assert torch.equal(nearest(features, centres, barred), centres[[0, 2, 1]])


@pytest.mark.parametrize("scenario", ["class", "random"])
def test_ducks_centres_are_originals_mean_features_of_retained_classes(problem, scenario):
    task = task_of(problem, "duck", scenario)
    watcher = HeadInputs()
    with watcher.watching(task.model, task.family.head):
        centres = Centres.of(task, watcher, 1.0, 1.0, 1.0)

    def features(part):
        batch = problem.source().fetch(torch.as_tensor(task.indices(part)))
        pooled = problem.original.forward_features(batch.inputs["x"])
        return problem.original.forward_head(pooled, pre_logits=True).detach(), batch.labels

    (kept, labels), (gone, own) = features("retain"), features("forget")
    known = labels.unique().tolist()
    means = {c: kept[labels == c].mean(0) for c in known}
    for row, (feature, label) in enumerate(zip(gone, own.tolist(), strict=True)):
        others = [c for c in known if c != label]
        best = max(others, key=lambda c: float(F.cosine_similarity(feature, means[c], dim=0)))
        torch.testing.assert_close(centres.goals[row], means[best], rtol=1e-4, atol=1e-5)
    assert np.array_equal(centres.members.numpy(), task.indices("forget"))


@pytest.mark.parametrize("adapter", [{}, {"peft": "lora"}])
def test_duck_reads_what_goes_into_an_adapted_head(problem, monkeypatch, adapter):
    """The adapter takes the place of the layer that a hook on Original would be on."""
    seen = []
    call = Centres.__call__

    def spy(self, forward, batches):
        value = call(self, forward, batches)
        seen.append((self.features.latest, [len(batches[part]) for part in self.parts]))
        return value

    monkeypatch.setattr(Centres, "__call__", spy)
    given = {"steps": 2, "batch_size": 4, "adapter": {"targets": ["head"], **adapter}}
    METHODS["duck"](resolve_config("duck", None, given, origin="test")).unlearn(
        task_of(problem, "duck")
    )
    (first, sizes), (second, _) = seen
    assert len(first) == sum(sizes) and not torch.equal(first, second)


def test_retain_images_of_the_forgotten_class_alone_are_refused(problem):
    task = task_of(problem, "duck")
    same = task.indices("forget")
    parts = {"forget": same[:4], "retain": same[4:]}
    task.indices = lambda *names: np.concatenate([parts[name] for name in names])
    for make in (lambda: Centres.of(task, HeadInputs(), 1, 1, 1), lambda: Blends.drawn(task, 0)):
        with pytest.raises(ConfigError, match="add retain images of other classes"):
            make()


# GS-LoRA -----------------------------------------------------------------------------------------


def test_gs_lora_sums_the_norms_of_the_factors_of_each_block(problem):
    model = copy.deepcopy(problem.original).double()
    attach(model, ("blocks.*.mlp.fc*",), AdapterConfig(rank=2), torch.Generator().manual_seed(0))
    blocks = [model.blocks[k].mlp for k in (0, 1)]
    with torch.no_grad():
        for seed, mlp in enumerate(blocks):
            mlp.double().fc1.A.copy_(normal(*mlp.fc1.A.shape, seed=seed))
    factors = [[*(f for la in (m.fc1, m.fc2) for f in (la.A, la.Bt))] for m in blocks]
    wanted = sum(torch.sqrt(sum((factor**2).sum() for factor in block)) for block in factors)
    ours = group_norms(model).sum()
    torch.testing.assert_close(ours, wanted)
    flat = [factor for block in factors for factor in block]
    for one, other in zip(
        torch.autograd.grad(ours, flat, retain_graph=True),
        torch.autograd.grad(wanted, flat),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_gs_lora_pushes_the_forget_loss_up_to_its_bound_and_no_further():
    method = METHODS["gs_lora"](METHODS["gs_lora"].Config(bound=2.0))
    term = method.forget_term(None)
    labels = torch.tensor([0, 1, 2])
    for scale, pushed in ((0.5, True), (30.0, False)):
        z = (scale * normal(3, 4, seed=5)).requires_grad_()
        ours = term(z, Batch({}, labels, torch.arange(3)))
        wanted = torch.relu(2.0 - F.cross_entropy(z, labels))
        torch.testing.assert_close(ours, wanted)
        assert bool(ours > 0) == pushed
        got, other = (torch.autograd.grad(x, z, retain_graph=True)[0] for x in (ours, wanted))
        torch.testing.assert_close(got, other)


def test_a_large_group_weight_shrinks_the_blocks(problem):
    def norm(alpha):
        params = {"steps": 30, "batch_size": 8, "alpha": alpha}
        config = resolve_config("gs_lora", None, params, origin="test")
        model = METHODS["gs_lora"](config).unlearn(task_of(problem, "gs_lora"))
        return float(group_norms(model).sum().detach())

    assert norm(5.0) < 0.5 * norm(0.0)
    for refused in ({"adapter": None}, {"adapter": {"peft": "lora"}}, {"fila": {}}):
        with pytest.raises(ConfigError, match="give adapter"):
            resolve_config("gs_lora", None, refused, origin="test")


# Layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(3, 4), nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(3, 4, (1, 2), dilation=2)],
)
def test_a_layer_is_a_product_with_its_rows(layer):
    inputs = normal(2, 3, 7, 7) if isinstance(layer, nn.Conv2d) else normal(2, 7, 3)
    found = rows_of(layer, inputs) @ layer.double().weight.flatten(1).T + layer.bias
    outputs = layer(inputs)
    wanted = outputs.permute(0, 2, 3, 1) if outputs.ndim == 4 else outputs
    torch.testing.assert_close(found, wanted.reshape(-1, 4))
    assert matrix_layers(nn.Sequential(layer, nn.Conv2d(4, 4, 1, groups=2))) == {"0": layer}


# All of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jit", "natmu", "duck", "pgu", "gs_lora", "duck_sine"])
def test_killed_runs_resume_bit_for_bit(problem, tiny, tmp_path, name):
    params = {"steps": 4, "batch_size": 8, "checkpoint_every": 2}
    config = resolve_config(name, None, params, origin="test")

    def run(checkpoint=None, progress=None):
        task = task_of(problem, name)
        task.checkpoint, task.telemetry = checkpoint, Telemetry(progress=progress)
        return METHODS[name](config).unlearn(task)

    model, steps = resumed(run, tmp_path, kill_at(3))
    assert steps == [3, 4] and tiny.same(model, run())
