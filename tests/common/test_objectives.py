"""Losses: stable where the textbook form is not, and the gradient that each formula promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.objectives.objectives import (
    CrossEntropy,
    ForgetRetain,
    gradient_difference,
    joint_logits,
)
from stable_forgetting.common.objectives.positions import (
    margins,
    sample_cross_entropy,
    unlikelihood,
)
from stable_forgetting.common.objectives.terms import pushed_away
from tests.common.made import stream


def sample_unlikelihood(logits, labels):
    """(N,) the mean over the positions of a sample that count."""
    counted = (labels != -100).sum(-1).clamp_min(1) if labels.ndim > 1 else 1
    values = unlikelihood(logits, labels)
    return (values.sum(-1) if labels.ndim > 1 else values) / counted


def random_logits(*shape, scale=3.0, dtype=torch.float32, seed=0):
    return scale * torch.randn(*shape, generator=stream(seed), dtype=torch.float64).to(dtype)


def batch(n, width=3, seed=0, classes=5):
    x = torch.randn(n, width, generator=stream(seed))
    return Batch({"x": x}, torch.arange(n) % classes, torch.arange(n))


class Counting:
    """A linear model that counts its forwards and keeps what it saw."""

    def __init__(self, width=3, classes=5):
        self.weight = torch.randn(width, classes, generator=stream(7), requires_grad=True)
        self.calls = []

    def __call__(self, batch):
        self.calls.append(len(batch))
        x = batch.inputs["x"]
        return x.mean(dim=1) @ self.weight if x.ndim == 3 else x @ self.weight


# Unlikelihood ------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [-1e4, -100.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 100.0, 1e4])
def test_unlikelihood_is_stable(margin):
    """The margin alone decides: softplus(m), slope sigmoid(m); never inf, never NaN."""
    logits = torch.tensor([[margin, 0.0]], requires_grad=True)
    loss = sample_unlikelihood(logits, torch.tensor([0]))
    loss.sum().backward()
    expected = max(margin, 0.0) + math.log1p(math.exp(-abs(margin)))
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-30)
    slope = 1 / (1 + math.exp(-margin)) if margin > -700 else 0.0
    assert logits.grad[0, 0].item() == pytest.approx(slope, rel=1e-5, abs=1e-30)
    assert torch.isfinite(logits.grad).all()


def test_unlikelihood_is_the_textbook_formula_in_float64():
    logits, labels = random_logits(50, 7, dtype=torch.float64), torch.arange(50) % 7
    p = logits.softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(
        sample_unlikelihood(logits, labels), -torch.log1p(-p), rtol=1e-8, atol=1e-12
    )
    textbook = (p / (1 - p)).log()
    torch.testing.assert_close(margins(logits, labels), textbook, rtol=1e-9, atol=1e-9)


def test_unlikelihood_saturates_and_ascent_does_not():
    """As p_y -> 0 the saturating gradient vanishes; ascent's tends to its largest."""
    labels = torch.tensor([0])
    norms = {"unlikelihood": [], "cross_entropy": []}
    for margin in (0.0, -5.0, -15.0, -40.0):
        for kind, values in norms.items():
            logits = torch.tensor([[margin, 0.0]], requires_grad=True)
            term = pushed_away(kind)(logits, Batch({}, labels, labels))
            values.append(float(torch.autograd.grad(term, logits)[0].norm()))
    falling, rising = norms["unlikelihood"], norms["cross_entropy"]
    assert falling == sorted(falling, reverse=True) and falling[-1] < 1e-15
    assert rising == sorted(rising) and rising[-1] == pytest.approx(math.sqrt(2), rel=1e-6)


def test_both_forget_losses_log_the_cross_entropy():
    logits, labels = random_logits(6, 4).requires_grad_(), torch.arange(6) % 4
    expected = F.cross_entropy(logits.detach(), labels)
    pushes = {}
    for kind in ("cross_entropy", "unlikelihood"):
        objective = ForgetRetain(pushed_away(kind))
        value = objective(lambda _: logits, {"forget": Batch({"x": logits}, labels, labels)})
        torch.testing.assert_close(value.parts["forget_loss"], expected)
        assert not value.parts["forget_loss"].requires_grad and value.total.requires_grad
        pushes[kind] = value.total.detach()
    torch.testing.assert_close(pushes["cross_entropy"], -expected)
    assert pushes["unlikelihood"] >= 0


# Cross-entropy and sequences ---------------------------------------------------------------------


@pytest.mark.parametrize("loss", [sample_cross_entropy, sample_unlikelihood])
def test_sequences_average_over_the_positions_that_count(loss):
    logits = random_logits(3, 6, 5)
    labels = torch.arange(18).view(3, 6) % 5
    labels[0, 3:] = -100
    labels[1, :5] = -100
    values = loss(logits, labels)
    assert values.shape == (3,)
    for row in range(3):
        keep = labels[row] != -100
        expected = loss(logits[row][keep], labels[row][keep]).mean()
        torch.testing.assert_close(values[row], expected)


def test_ignored_margins_are_zero():
    values = margins(random_logits(2, 3, 4), torch.tensor([[-100, 1, 2], [3, -100, 0]]))
    assert values[0, 0] == 0 and values[1, 1] == 0
    assert torch.count_nonzero(values) == 4


# Objectives --------------------------------------------------------------------------------------


def test_one_forward_where_shapes_allow_two_where_not():
    model = Counting()
    logits = joint_logits(model, [batch(4), batch(3, seed=1)])
    assert model.calls == [7] and [len(part) for part in logits] == [4, 3]
    torch.testing.assert_close(logits[0], Counting()(batch(4)))
    torch.testing.assert_close(logits[1], Counting()(batch(3, seed=1)))
    model = Counting()
    longer = Batch(
        {"x": torch.randn(2, 9, 3, generator=stream())}, torch.tensor([0, 1]), torch.arange(2)
    )
    shorter = Batch(
        {"x": torch.randn(3, 5, 3, generator=stream())}, torch.arange(3), torch.arange(3)
    )
    logits = joint_logits(model, [longer, shorter])
    assert model.calls == [2, 3] and [len(part) for part in logits] == [2, 3]


@pytest.mark.parametrize("forget_loss", ["cross_entropy", "unlikelihood"])
@pytest.mark.parametrize(("w_r", "w_f"), [(1.0, 0.1), (1e-5, 1e-4), (1.0, 0.0)])
def test_gradient_difference_is_its_formula(w_r, w_f, forget_loss):
    model, retain, forget = Counting(), batch(6), batch(4, seed=1)
    terms = gradient_difference(w_r, w_f, forget_loss)(model, {"retain": retain, "forget": forget})
    assert model.calls == [10], "one forward over both"
    z_r, z_f = Counting()(retain), Counting()(forget)
    kept, loss = F.cross_entropy(z_r, retain.labels), F.cross_entropy(z_f, forget.labels)
    p = z_f.softmax(-1).gather(1, forget.labels[:, None])
    push = -loss if forget_loss == "cross_entropy" else -(1 - p).log().mean()
    torch.testing.assert_close(terms.total, w_r * kept + w_f * push)
    torch.testing.assert_close(terms.parts["retain_loss"], kept)
    torch.testing.assert_close(terms.parts["forget_loss"], loss)
    assert set(terms.parts) == {"retain_loss", "forget_loss"}


def test_cross_entropy_names_its_part():
    objective, data = CrossEntropy("mixed"), batch(5)
    assert objective.parts == ("mixed",)
    terms = objective(Counting(), {"mixed": data})
    torch.testing.assert_close(terms.total, F.cross_entropy(Counting()(data), data.labels))
    assert set(terms.parts) == {"mixed_loss"}
