"""Methods on hidden states of language models: their formulas by value and gradient."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import IGNORE, Batch
from stable_forgetting.common.objectives.objectives import ForgetRetain
from stable_forgetting.common.objectives.positions import cross_entropy
from stable_forgetting.common.objectives.terms import Mean, pushed_away
from stable_forgetting.common.train.protocols import Telemetry
from stable_forgetting.language.methods.hidden import Steering
from stable_forgetting.language.methods.rerouting import (
    Progress,
    Rerouting,
    UnderAttack,
    lower_blocks,
    shifted,
)
from tests.common.made import values_of
from tests.common.train.trained import kill_at, resumed
from tests.language.made import log_p
from tests.language.test_methods import make_task, split, text, trained  # noqa: F401 - fixtures


class Blocks(nn.Module):
    """Three blocks over vectors, in float64."""

    def __init__(self, seed=0):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)
        self.double()
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(values_of(*parameter.shape, seed=seed + place, scale=0.7))

    def forward(self, x):
        for block in self.h:
            x = x + torch.tanh(block(x))
        return self.head(x)


def run(model, batch):
    return model(batch.inputs["x"])


def part_of(seed):
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    inputs = {"x": values_of(2, 3, 4, seed=seed), "attention_mask": mask}
    return Batch(inputs, torch.tensor([[1, 0, 2], [3, 1, IGNORE]]), torch.arange(2))


BATCHES = {"forget": part_of(21), "retain": part_of(22)}
REAL = BATCHES["forget"].inputs["attention_mask"].bool()


def outputs(model, batch, block):
    """What a block returns, by a hook of its own."""
    found = []
    handle = model.h[block].register_forward_hook(lambda *args: found.append(args[2]))
    run(model, batch)
    handle.remove()
    return found[0]


def assert_agree(objective, published, model):
    total = objective(partial(run, model), BATCHES).total
    wanted = published()
    torch.testing.assert_close(total, wanted)
    parameters = [*model.parameters()]
    found = [torch.autograd.grad(v, parameters, allow_unused=True) for v in (total, wanted)]
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = (torch.zeros(1) if g is None else g for g in (ours, theirs))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-9, atol=1e-12)


def test_adaptive_rmu_has_a_vector_as_long_as_originals_state():
    model, frozen = Blocks(), Blocks(50)
    u = F.normalize(values_of(4, seed=9).abs(), dim=0)
    fields = model, frozen, "h.1", run, 5.0 * u, "all", 2.0, 3.0, "tokens"

    def published():
        norm = outputs(frozen, BATCHES["forget"], 1).norm(dim=-1, keepdim=True).detach()
        push = (outputs(model, BATCHES["forget"], 1) - 5.0 * norm * u)[REAL]
        hold = outputs(model, BATCHES["retain"], 1) - outputs(frozen, BATCHES["retain"], 1).detach()
        return 2 * push.square().mean() + 3 * hold[REAL].square().mean()

    assert_agree(Steering(*fields, adaptive=True), published, model)
    with pytest.raises(AssertionError):
        assert_agree(Steering(*fields), published, model)


def rerouting(model, frozen, progress, nudge=None):
    nudge = torch.zeros(4, dtype=torch.float64) if nudge is None else nudge
    return Rerouting(
        model, frozen, ["h.0", "h.2"], run, "all", 10.0, 10.0, "tokens", progress, nudge
    )


def test_circuit_breakers_follow_the_published_loss_and_schedule():
    model, frozen, progress = Blocks(), Blocks(50), Progress()
    progress.total, progress.steps = 150, 29

    def published():  # step 30, of 150, divided by 300
        done, layers = 30 / 300, (0, 2)
        forget, retain = BATCHES["forget"], BATCHES["retain"]
        now, then = (torch.stack([outputs(m, forget, b) for b in layers]) for m in (model, frozen))
        unit = [h / h.norm(dim=-1, keepdim=True) for h in (now, then.detach())]
        inner = unit[0] * unit[1] * REAL[None, :, :, None]
        turn = torch.relu(inner.sum(-1)).sum() / (REAL.sum() * 2)
        now, then = (torch.stack([outputs(m, retain, b) for b in layers]) for m in (model, frozen))
        hold = torch.norm(now - then.detach(), dim=-1, p=2)[:, REAL].mean()
        return 10 * done * hold + 10 * (1 - done) * turn

    assert_agree(rerouting(model, frozen, progress), published, model)
    again = Progress()
    again.load_state(progress.state())
    assert again.steps == 29


def test_circuit_breakers_leave_their_start_by_the_nudge_alone():
    def slope(nudge):
        model = Blocks()
        objective = rerouting(model, copy.deepcopy(model), Progress(), nudge)
        total = objective(partial(run, model), BATCHES).total
        found = torch.autograd.grad(total, model.h[0].weight)[0]
        return float(found.norm())

    assert slope(None) < 1e-12 and slope(1e-3 * values_of(4)) > 1e-4


@pytest.mark.parametrize(("depth", "wanted"), [(32, [9, 19]), (12, [2, 6]), (2, [0])])
def test_circuit_breakers_default_to_the_published_layers(depth, wanted):
    model = nn.ModuleDict({"h": nn.ModuleList(nn.Identity() for _ in range(depth))})
    assert lower_blocks(model) == [f"h.{place}" for place in wanted]


def attacked(model, steps=16, epsilon=0.5):
    terms = ForgetRetain(
        pushed_away("unlikelihood", "tokens"), Mean(cross_entropy, "tokens"), 2.0, 4.0
    )
    lured = Mean(cross_entropy, "tokens")
    return UnderAttack(model, terms, "h.1", lured, epsilon, steps, 0.05)


def mean_loss(model, batch):
    z = run(model, batch)
    return F.cross_entropy(z.reshape(-1, 5), batch.labels.reshape(-1), ignore_index=IGNORE)


def by_hand(model, batch, steps, epsilon, lr):
    """Adam with decoupled decay of .01, projected after each step."""
    shift, first, second = (torch.zeros(2, 3, 4, dtype=torch.float64) for _ in range(3))
    for step in range(1, steps + 1):
        leaf = shift.clone().requires_grad_()
        with shifted(model.h[1], leaf * REAL[:, :, None]):
            gradient = torch.autograd.grad(mean_loss(model, batch), leaf)[0]
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        size = (second / (1 - 0.999**step)).sqrt() + 1e-8
        shift = (1 - lr * 0.01) * shift - lr * first / (1 - 0.9**step) / size
        norm = shift.norm(dim=-1, keepdim=True)
        shift = torch.where(norm > epsilon, shift / norm * epsilon, shift)
    return shift * REAL[:, :, None]


def test_lat_trains_under_the_shift_that_brings_forget_back():
    model = Blocks()
    objective = attacked(model)
    forget, retain = BATCHES["forget"], BATCHES["retain"]
    shift = objective.attack(partial(run, model), forget)
    torch.testing.assert_close(shift, by_hand(model, forget, 16, 0.5, 0.05))
    assert shift.norm(dim=-1).max() <= 0.5 + 1e-9 and not shift[~REAL].any()
    with torch.no_grad():
        before = mean_loss(model, forget)
        with shifted(model.h[1], shift):
            assert mean_loss(model, forget) < before - 0.2
    assert all(parameter.grad is None for parameter in model.parameters())

    def published():
        with shifted(model.h[1], shift):
            p = log_p(run(model, forget), forget.labels).exp()
        away = -torch.log(1 - p)[forget.labels != IGNORE].mean()
        return 2 * away + 4 * mean_loss(model, retain)

    assert_agree(objective, published, model)


def test_lat_without_an_attack_is_gradient_difference():
    model = Blocks()
    objective = attacked(model, steps=0)
    assert_agree(objective, lambda: objective.objective(partial(run, model), BATCHES).total, model)


class Spread(nn.Module):
    """Blocks on two devices, as device_map lays them; logits go where the inputs lie."""

    def __init__(self):
        super().__init__()
        places = ("cuda:0", "cuda:1", "cuda:1")
        self.h = nn.ModuleList(nn.Linear(4, 4, device=place) for place in places)

    def forward(self, x):
        here = x.device
        for block in self.h:
            x = x.to(block.weight.device)
            x = x + torch.tanh(block(x))
        return x.to(here)


@pytest.mark.parametrize("positions", ["scored", "answers", "all"])
def test_steered_blocks_may_lie_elsewhere_than_the_batch(positions):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, frozen = Spread(), Spread()
        inputs = {"x": torch.zeros(2, 4, 4), "attention_mask": torch.ones(2, 4).long()}
        inputs["positions"] = torch.zeros(2, 4).long()
        batch = Batch(inputs, torch.zeros(2, 4).long(), torch.arange(2))
        batches, nudge = {"forget": batch, "retain": batch}, torch.zeros(4)
        forward, layers = partial(run, model), ["h.0", "h.2"]
        for adaptive in (False, True):
            fields = (run, nudge, positions, 2.0, 3.0, "tokens", adaptive)
            assert Steering(model, frozen, "h.1", *fields)(forward, batches).total.is_cuda
        terms = (run, positions, 10.0, 10.0, "tokens", Progress(), nudge)
        assert Rerouting(model, frozen, layers, *terms)(forward, batches).total.is_cuda
        shift = attacked(model, steps=0).attack(forward, batch)
        assert shift.device == torch.device("cuda:1")


def test_circuit_breakers_resume_at_their_place_in_the_schedule(trained, make_task, tmp_path):  # noqa: F811
    cls = METHODS["circuit_breakers"]
    config = cls.Config(steps=8, batch_size=3, lr=1e-2, checkpoint_every=3)

    def go(checkpoint=None, progress=None):
        task = make_task(copy.deepcopy(trained), cls.info.access)
        task.telemetry, task.checkpoint = Telemetry(progress=progress), checkpoint
        return cls(config).unlearn(task).state_dict()

    state, steps = resumed(go, tmp_path, kill_at(5))
    assert steps[0] == 4 and all(torch.equal(value, state[key]) for key, value in go().items())
