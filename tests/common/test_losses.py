"""Position losses: closed forms of values and gradients, masks, averages, low precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from stable_forgetting.common.data.batch import IGNORE
from stable_forgetting.common.objectives import positions as losses
from stable_forgetting.common.objectives.positions import sample_cross_entropy
from tests.common.made import values_of

REFERENCE = {
    "divergence": losses.divergence,
    "raw_divergence": losses.raw_divergence,
    "towards": losses.towards,
}
POSITION = {
    "cross_entropy": losses.cross_entropy,
    "unlikelihood": losses.unlikelihood,
    "inverted_hinge": losses.inverted_hinge,
    "divergence_from_uniform": losses.divergence_from_uniform,
    **{k: lambda z, y, f=f: f(z, 0.5 * z.detach().flip(-1), y) for k, f in REFERENCE.items()},
}


def labels_of(n, size):
    return torch.arange(n) % size


# The inverted hinge ------------------------------------------------------------------------------


def hinge_gradient(z, y):
    """The paper's, term by term."""
    p = z.softmax(-1)
    expected = torch.zeros_like(z)
    for n in range(len(z)):
        others = [v for v in range(z.shape[-1]) if v != y[n]]
        rival = max(others, key=lambda v: p[n, v])
        own, best = p[n, y[n]], p[n, rival]
        for v in others:
            expected[n, v] = p[n, v] * (best - own)
        expected[n, rival] = -best * (1 + own - best)
        expected[n, y[n]] = own * (1 - own + best)
    return expected


@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_gradient_of_the_inverted_hinge_is_the_papers(scale):
    z, y = values_of(40, 7, scale=scale).requires_grad_(), labels_of(40, 7)
    gradient = torch.autograd.grad(losses.inverted_hinge(z, y).sum(), z)[0]
    torch.testing.assert_close(gradient, hinge_gradient(z.detach(), y), rtol=1e-10, atol=1e-12)
    assert gradient.abs().max() <= 0.5
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(40, dtype=torch.float64))


def test_the_rival_is_never_the_label_even_at_a_tie():
    z = torch.zeros(3, 4)
    torch.testing.assert_close(losses.inverted_hinge(z, torch.tensor([0, 1, 3])), torch.ones(3))


# Divergences -------------------------------------------------------------------------------------


def test_divergence_is_torchs():
    z, fixed, y = values_of(6, 5), values_of(6, 5, seed=1), labels_of(6, 5)
    expected = F.kl_div(
        z.log_softmax(-1), fixed.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(losses.divergence(z, fixed, y), expected)
    raw = F.kl_div(z, fixed, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(losses.raw_divergence(z, fixed, y), raw)


@pytest.mark.parametrize("floor", [0.0, 1e-12])
def test_divergence_from_uniform_has_its_minimum_at_uniform(floor):
    flat = torch.full((2, 9), 1.7, dtype=torch.float64, requires_grad=True)
    value = losses.divergence_from_uniform(flat, labels_of(2, 9), floor)
    assert value.abs().max() < 1e-10
    assert torch.autograd.grad(value.sum(), flat)[0].abs().max() < 1e-10
    z = values_of(30, 9)
    values = losses.divergence_from_uniform(z, labels_of(30, 9), floor)
    assert values.min() > 0.01
    entropy_form = -math.log(9) - z.log_softmax(-1).mean(-1)
    torch.testing.assert_close(values, entropy_form, rtol=1e-8, atol=1e-8)


# Soft targets ------------------------------------------------------------------------------------


def test_lowered_moves_the_label_alone():
    z, y = values_of(3, 4), torch.tensor([2, IGNORE, 0])
    changed = losses.lowered(z, y, 10.0) - z
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[0, 2] = expected[2, 0] = -10.0
    torch.testing.assert_close(changed, expected)


def test_towards_itself_without_the_label_has_gradient_p_minus_q():
    z, y = values_of(5, 4).requires_grad_(), labels_of(5, 4)
    target = losses.lowered(z.detach(), y, float("inf"))
    gradient = torch.autograd.grad(losses.towards(z, target, y).sum(), z)[0]
    torch.testing.assert_close(gradient, z.detach().softmax(-1) - target.softmax(-1))
    assert torch.equal(target.softmax(-1).gather(-1, y[:, None]), torch.zeros(5, 1).double())


# Likelihoods and preferences ---------------------------------------------------------------------


def test_log_likelihood_sums_over_the_answer():
    z, y = values_of(2, 3, 5), torch.tensor([[1, 2, IGNORE], [0, 4, 3]])
    p = z.log_softmax(-1)
    expected = [p[0, 0, 1] + p[0, 1, 2], p[1, 0, 0] + p[1, 1, 4] + p[1, 2, 3]]
    torch.testing.assert_close(losses.log_likelihood(z, y), torch.stack(expected))
    torch.testing.assert_close(losses.log_likelihood(z[:, 0], y[:, 0]), p[[0, 1], 0, y[:, 0]])


@pytest.mark.parametrize("beta", [1e-4, 0.3, 4.5])
def test_preference_slope_is_twice_a_sigmoid(beta):
    ratio = torch.linspace(-30, 30, 13, dtype=torch.float64, requires_grad=True)
    values = losses.negative_preference(ratio, beta)
    assert values[6].item() == pytest.approx(2 * math.log(2) / beta), "at equality"
    slope = torch.autograd.grad(values.sum(), ratio)[0]
    torch.testing.assert_close(slope, 2 * torch.sigmoid(beta * ratio.detach()))


# All of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POSITION)
def test_ignored_positions_are_zero_and_get_no_gradient(name):
    z = values_of(2, 4, 6).requires_grad_()
    y = torch.tensor([[1, 2, IGNORE, IGNORE], [3, 0, 5, IGNORE]])
    values = POSITION[name](z, y)
    assert values.shape == y.shape and (values[y == IGNORE] == 0).all()
    gradient = torch.autograd.grad(values.sum(), z)[0]
    assert (gradient[y == IGNORE] == 0).all() and (gradient[y != IGNORE] != 0).any()


@pytest.mark.parametrize("name", POSITION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_widened(name, dtype):
    z, y = values_of(3, 5).to(dtype), labels_of(3, 5)
    values = POSITION[name](z, y)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, POSITION[name](z.float(), y))


@pytest.mark.parametrize("name", sorted(POSITION.keys() - {"raw_divergence"}))
def test_extreme_logits_stay_finite(name):
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], requires_grad=True)
    values = POSITION[name](z, torch.tensor([1, 1]))
    assert torch.isfinite(values).all()
    assert torch.isfinite(torch.autograd.grad(values.sum(), z)[0]).all()


def test_averages_weigh_samples_or_tokens():
    values = torch.tensor([[2.0, 0.0, 0.0], [1.0, 3.0, 5.0]])
    y = torch.tensor([[0, IGNORE, IGNORE], [0, 0, 0]])
    assert float(losses.average(values, y, "samples")) == pytest.approx((2 + 3) / 2)
    assert float(losses.average(values, y, "tokens")) == pytest.approx(11 / 4)
    classes = torch.tensor([0, 1])
    for over in ("samples", "tokens"):
        assert float(losses.average(values[:, 0], classes, over)) == pytest.approx(1.5)


def test_sample_average_is_that_of_the_sample_losses():
    z, y = values_of(2, 3, 5), torch.tensor([[1, 2, IGNORE], [0, 4, 3]])
    mean = losses.average(losses.cross_entropy(z, y), y, "samples")
    torch.testing.assert_close(mean, sample_cross_entropy(z, y).mean())
