"""Methods of two gradients: their rules against the published formulas."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import IGNORE, Batch
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.objectives.objectives import ForgetRetain
from stable_forgetting.common.objectives.positions import cross_entropy
from stable_forgetting.common.objectives.terms import Mean
from tests.common.made import loss_of, normal

WITH_STATE = {"gru": {}, "gdr_gma": {"gamma": 3.0, "level": 0.2}}
NOISE = 1.0


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def pair(seed=0, *, opposed=False):
    """A forget and a retain gradient of two tensors, which oppose one another or not."""
    ours = [normal(3, 4, seed=seed), normal(5, seed=seed + 1)]
    kept = [normal(3, 4, seed=seed + 2), normal(5, seed=seed + 3)]
    sign = -1 if opposed else 1
    return ours, [sign * torch.copysign(k, u) for k, u in zip(kept, ours, strict=True)]


ZERO = torch.zeros((), dtype=torch.float64)


def gradient_of(loss, model):
    return torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)


def total_of(model, objective, batches):
    value = objective(lambda batch: model(batch.inputs["x"]), batches)
    return value.total, gradient_of(value.total, model)


def terms(w_f=1.0, w_r=1.0):
    return ForgetRetain(Mean(cross_entropy, sign=-1.0), Mean(cross_entropy), w_f, w_r)


# Rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opposed", [False, True])
def test_munba_weighs_as_the_published_closed_form_and_strikes_the_bargain(opposed):
    ours, kept = pair(opposed=opposed)
    u, k = flat(ours), flat(kept)
    g1, g2, g3 = k @ k, k @ u, u @ u
    a_r = ((g1 * g3 - g2 * (g1 * g3).sqrt()) / (g1 * g1 * g3 - g1 * g2 * g2)).sqrt()
    a_f = (1 - g1 * a_r**2) / (g2 * a_r)
    found = [flat(vector) for vector in tools.bargained(ours, kept, ZERO)]
    torch.testing.assert_close(found[0], a_f * u)
    torch.testing.assert_close(found[1], a_r * k)
    step = sum(found)
    torch.testing.assert_close(torch.stack([u @ step, k @ step]), torch.stack([1 / a_f, 1 / a_r]))
    assert float(step.norm()) == pytest.approx(math.sqrt(2))


def test_munbas_forget_data_get_random_labels_and_what_is_no_label_stays_none():
    z, labels = normal(3, 2, 5), torch.tensor([[0, 1], [2, IGNORE], [3, 4]])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found, again = (tools.to_random_labels(z, labels) for _ in range(2))
        torch.manual_seed(3)
        other = torch.randint(5, (3, 2))
    wanted = -z.log_softmax(-1).gather(-1, other.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, wanted * (labels != IGNORE))
    assert not torch.equal(found, again)


def test_ngdiff_is_the_difference_of_unit_gradients_however_large_a_loss_is(line):
    model, batches = line
    total, ours = total_of(model, tools.ByRule(model, terms(2.0, 3.0), tools.normalised), batches)
    forget, retain = (loss_of(model, batches[part]) for part in ("forget", "retain"))
    g, k = (gradient_of(loss, model) for loss in (forget, retain))
    torch.testing.assert_close(total, 3 * retain - 2 * forget)
    torch.testing.assert_close(
        flat(ours), 3 * flat(k) / flat(k).norm() - 2 * flat(g) / flat(g).norm()
    )
    one, two = pair()
    more = [100 * tensor for tensor in one]
    same = [flat(tools.normalised(vector, two, ZERO)[0]) for vector in (one, more)]
    torch.testing.assert_close(*same)


def test_gru_takes_off_what_opposes_the_moving_average_of_retain():
    rule = tools.Smoothed(0.8)
    ours, kept = pair(opposed=True)
    u, k = flat(ours), flat(kept)
    first, same = rule(ours, kept, ZERO)
    torch.testing.assert_close(flat(first), u - (u @ k) / (k @ k) * k)
    torch.testing.assert_close(flat(same), k)
    later, other = pair(10, opposed=True)
    copied = tools.Smoothed(0.8)
    copied.load_state(rule.state())
    mean = 0.8 * flat(other) + 0.2 * 0.8 * k
    u = flat(later)
    assert u @ mean < 0
    for one in (rule, copied):
        found = flat(one(later, other, ZERO)[0])
        torch.testing.assert_close(found, u - (u @ mean) / (mean @ mean) * mean)
        torch.testing.assert_close(found @ mean, ZERO, rtol=0, atol=1e-10)


def test_gru_without_a_conflict_is_ascent_alone(line):
    model, batches = line
    alike = {"forget": batches["forget"], "retain": batches["forget"]}
    towards = ForgetRetain(Mean(cross_entropy), Mean(cross_entropy), 1.0, 0.0)
    _, ours = total_of(model, tools.ByRule(model, towards, tools.Smoothed(0.8)), alike)
    torch.testing.assert_close(ours, gradient_of(loss_of(model, batches["forget"]), model))
    _, ours = total_of(model, tools.ByRule(model, terms(1.0, 0.0), tools.Smoothed(0.8)), alike)
    torch.testing.assert_close(flat(ours), torch.zeros(16, dtype=torch.float64))


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.5])
def test_gdr_gma_projects_each_off_the_other_in_each_tensor_and_weighs_by_the_loss(loss):
    ours, kept = pair(opposed=True)
    kept[1] = -kept[1]  # here the two agree
    share = 1 / (1 + math.exp(3 * (loss - 0.02)))
    found = tools.Adjusted(9, 3.0, 0.02)(ours, kept, torch.tensor(loss, dtype=torch.float64))
    u, k = ours[0], kept[0]
    overlap = (u * k).sum()
    wanted_u = [share * (u - overlap / k.square().sum() * k), share * ours[1]]
    wanted_k = [(1 - share) * (k - overlap / u.square().sum() * u), (1 - share) * kept[1]]
    torch.testing.assert_close(found[0], wanted_u)
    torch.testing.assert_close(found[1], wanted_k)


def test_gdr_gma_remembers_the_last_pass_of_the_last_tensor():
    quiet, low = [torch.zeros(1).double()], ZERO - 1e9  # no retain gradient, weight 1
    one, two = torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.0, 1.0, 0.0]).double()
    last = torch.tensor([-1.0, -1.0, 2.0]).double()
    rule = tools.Adjusted(3, 1.0, 0.0)
    for tensor in (-one, one, two):  # the first one is forgotten again
        assert rule([tensor], quiet, low)[0][0].tolist() == tensor.tolist()
    again = tools.Adjusted(3, 1.0, 0.0)
    again.load_state(rule.state())
    mean = (one + two) / 2
    wanted = last - (last @ mean) / (mean @ mean) * mean
    for each in (rule, again):
        torch.testing.assert_close(each([last], quiet, low)[0][0], wanted)
    assert rule.steps == 4 and len(rule.bank) == 3


def test_orthograd_ascends_off_every_retained_samples_gradient(line):
    model, batches = line
    several = Batch({"x": batches["retain"].inputs["x"][:2]}, torch.tensor([0, 1]), torch.arange(2))
    given = {"forget": batches["forget"], "retain": several}
    total, ours = total_of(model, tools.Orthogonal(model, terms(2.0, 3.0)), given)
    forget, retain = (loss_of(model, given[part]) for part in ("forget", "retain"))
    torch.testing.assert_close(total, 3 * retain - 2 * forget)
    losses = F.cross_entropy(model(several.inputs["x"]), several.labels, reduction="none")
    each = [gradient_of(loss, model) for loss in losses]
    for place, g in enumerate(gradient_of(forget, model)):
        k = torch.stack([sample[place].flatten() for sample in each], dim=1)  # (entries, samples)
        rest = g.flatten() - k @ torch.linalg.lstsq(k, g.flatten().unsqueeze(1)).solution.squeeze(1)
        wanted = 3 * k.mean(1) - 2 * rest
        torch.testing.assert_close(ours[place].flatten(), wanted)
        torch.testing.assert_close(k.mT @ rest, torch.zeros(2).double(), rtol=0, atol=1e-10)


def test_orthograd_leaves_what_no_direction_spans():
    vector, one = normal(3, 4), normal(3, 4, seed=1)
    alone = tools.orthogonal_to(torch.stack([one]), vector)
    many = torch.stack([one, torch.zeros_like(one), -2 * one])
    torch.testing.assert_close(tools.orthogonal_to(many, vector), alone)
    assert torch.equal(tools.orthogonal_to(torch.zeros(2, 3, 4).double(), vector), vector)
    every = tools.orthogonal_to(normal(20, 3, 4, seed=2), vector)
    torch.testing.assert_close(every, torch.zeros_like(vector))


# In training -----------------------------------------------------------------------------------


@pytest.fixture
def unlearnt(tiny, baseline):
    """Name, options of the task, settings -> the method after a short run and its model."""
    source = tiny.Source(noise=NOISE)
    split = tiny.split(source)
    original = baseline.original(source, split)

    def go(name, options=(), **params):
        given = {"lr": 3e-3, "steps": 6, "batch_size": 8, **params}
        method = METHODS[name](resolve_config(name, None, given, origin="test"))
        fields = {"model": copy.deepcopy(original), "recipe": baseline.recipe, **dict(options)}
        task = tiny.task(source, split, access=METHODS[name].info.access, **fields)
        return method, method.unlearn(task)

    return go


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *WITH_STATE.items(),
        ("pdu", {}),
        ("rfe", {"epochs": None, "first": 3}),
        ("gru_sine", {}),
        ("npo_sam_sine", {}),
    ],
)
def test_looking_changes_nothing(unlearnt, name, params):
    """Neither a state nor the list of what is trained."""
    plain, watched = (
        unlearnt(name, **params, probe_every=every)[1].state_dict() for every in (0, 1)
    )
    assert all(torch.equal(plain[key], watched[key]) for key in plain)


def test_a_constraint_is_weighed_once_an_optimizer_step(unlearnt, monkeypatch):
    steps = []
    monkeypatch.setattr(tools.Multiplier, "__call__", lambda self, _: steps.append(self))
    unlearnt("pdu", accumulation=4)
    assert len(steps) == 6
    method, _ = unlearnt("rfe", epochs=None, first=3, accumulation=4)
    assert method._phases.steps == 6


@pytest.mark.parametrize("name", ["uam", "npo_sam"])
def test_steps_to_other_weights_see_the_adapters_weights_there(unlearnt, name):
    """Micro-batches do not share weights that have moved in between."""
    given = {"epochs": None} if name == "uam" else {}
    one = unlearnt(f"{name}_sine", **given)[1].state_dict()
    several = unlearnt(f"{name}_sine", **given, accumulation=2)[1].state_dict()
    assert any(not torch.equal(one[key], several[key]) for key in one)


# Checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_STATE)
def test_killed_methods_resume_bit_for_bit(unlearnt, baseline, tmp_path, name):
    given = {"steps": 20, "checkpoint_every": 4, **WITH_STATE[name]}

    def go(**options):
        return unlearnt(name, options, **given)[1]

    assert baseline.resumes(go, tmp_path)[0] == 9
