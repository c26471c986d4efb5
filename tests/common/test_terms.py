"""Terms of the literature's objectives: their limits, their references, what they read."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from stable_forgetting.common.data.batch import IGNORE, Batch, every_position
from stable_forgetting.common.methods.tools.passes import reference_likelihoods
from stable_forgetting.common.objectives import positions as losses
from stable_forgetting.common.objectives import terms
from stable_forgetting.common.objectives.objectives import ForgetRetain
from stable_forgetting.common.train.config import FitConfig

LABELS = torch.tensor([[1, 2, IGNORE], [0, 4, 3]])


def logits_of(seed=0, scale=2.0):
    stream = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(2, 3, 5, generator=stream, dtype=torch.float64)).requires_grad_()


def batch_of(labels=LABELS):
    return Batch({"x": torch.zeros(len(labels), 1)}, labels, torch.tensor([3, 7]))


def table(values):
    return terms.LogLikelihoods(torch.tensor([3, 5, 7]), torch.as_tensor(values).double())


def gradient(term, z, batch=None):
    return torch.autograd.grad(term(z, batch or batch_of()), z)[0]


def test_npo_tends_to_ascent_on_the_sum_as_beta_vanishes():
    z, reference = logits_of(), table([-4.0, 0.0, -9.0])
    ascent = torch.autograd.grad(losses.log_likelihood(z, LABELS).mean(), z)[0]
    gaps = [
        float((gradient(terms.preference_against(reference, beta), z) - ascent).abs().max())
        for beta in (1e-1, 1e-3, 1e-5)
    ]
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 1e-4


def test_npo_starts_as_ascent_and_fades_as_the_answer_is_forgotten():
    z = logits_of()
    now = losses.log_likelihood(z, LABELS).detach()
    ascent = torch.autograd.grad(losses.log_likelihood(z, LABELS).mean(), z)[0]
    start = table([now[0], 0.0, now[1]])
    torch.testing.assert_close(gradient(terms.preference_against(start, 0.5), z), ascent)
    forgotten = table([now[0] + 40, 0.0, now[1] + 40])
    faded = gradient(terms.preference_against(forgotten, 0.5), z)
    torch.testing.assert_close(faded, 2 / (1 + math.exp(20)) * ascent)


def test_references_are_looked_up_by_index():
    found = table([10.0, 11.0, 12.0])(batch_of())
    assert found.tolist() == [10.0, 12.0]
    with pytest.raises(AssertionError):
        table([10.0, 11.0, 12.0])(Batch({}, LABELS, torch.tensor([3, 4])))


def test_self_distillation_rests_where_the_label_is_lowered():
    fixed = logits_of().detach()
    there = losses.lowered(fixed, LABELS, 10.0).requires_grad_()
    term = terms.self_distillation(lambda batch: fixed, 10.0)
    assert gradient(term, there).abs().max() < 1e-12
    assert gradient(term, fixed.clone().requires_grad_()).abs().max() > 0.05


def test_ce_u_can_skip_the_first_positions():
    z = logits_of()
    whole, skipped = gradient(terms.without_the_label(), z), gradient(terms.without_the_label(1), z)
    assert (skipped[:, 0] == 0).all() and (whole[:, 0] != 0).any()
    torch.testing.assert_close(skipped[:, 1:] * 3 / 5, whole[:, 1:])


# Putting them together ---------------------------------------------------------------------------


def push(logits, batch):
    return logits.sum()


def test_forget_retain_weighs_and_reads_what_it_needs():
    seen = []

    def forward(batch):
        seen.append(len(batch))
        return batch.inputs["x"] * torch.ones(len(batch), 5)

    two, one = batch_of(torch.tensor([1, 0])), batch_of(torch.tensor([2, 3]))
    two.inputs["x"].fill_(1.0)
    alone = ForgetRetain(push)
    assert alone.parts == ("forget",)
    assert float(alone(forward, {"forget": two}).total) == 10.0
    both = ForgetRetain(push, push, 0.5, 2.0)
    result = both(forward, {"forget": one, "retain": two})
    assert both.parts == ("forget", "retain") and seen == [2, 4]
    assert float(result.total) == 0.5 * 0 + 2.0 * 10
    assert set(result.parts) == {"forget_term", "forget_loss", "retain_term", "retain_loss"}
    assert not result.parts["retain_loss"].requires_grad


def test_a_view_replaces_the_batch_of_its_part_and_logs_no_loss():
    def wider(batch):
        return Batch({"x": batch.inputs["x"] + 1}, batch.labels, batch.indices)

    objective = ForgetRetain(push, push, views={"forget": wider})
    batch = batch_of(torch.tensor([1, 0]))
    batches = {"forget": batch, "retain": batch}
    result = objective(lambda b: b.inputs["x"] * torch.ones(len(b), 5), batches)
    assert float(result.parts["forget_term"]) == 10 and float(result.parts["retain_term"]) == 0
    assert "forget_loss" not in result.parts and "retain_loss" in result.parts


def test_every_position_is_the_sources_answer():
    batch = batch_of()
    assert every_position(SimpleNamespace())(batch) is batch
    other = batch_of()
    assert every_position(SimpleNamespace(everywhere=lambda b: other))(batch) is other


def test_reference_pass_sees_eval_mode_and_leaves_no_trace(tiny):
    source = tiny.Source()
    model = tiny.net(dropout=0.5).train()
    task = tiny.task(source, tiny.split(source), access=frozenset({"forget"}), model=model)
    before = tiny.snapshot(model)
    stream = torch.get_rng_state()
    indices = task.indices("forget")
    found, again = (
        reference_likelihoods(task, indices, FitConfig(steps=1, batch_size=n)) for n in (5, 3)
    )
    assert all(module.training for module in model.modules())
    assert tiny.same(model, before) and torch.equal(torch.get_rng_state(), stream)
    torch.testing.assert_close(found.values, again.values)
    batch = source.fetch(torch.as_tensor(indices))
    with torch.no_grad():
        expected = losses.log_likelihood(tiny.forward(model.eval(), batch), batch.labels)
    torch.testing.assert_close(found(batch), expected)
    assert source.fetched == set(indices.tolist())
