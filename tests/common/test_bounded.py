"""The kernel: gradients, bounds and precision of every phi."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from stable_forgetting.common.bounded import phi as activations
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.product import bounded_delta, bounded_linear, gram_norm

PHIS = tuple(activations.PHIS)
BOUNDED = sorted(name for name, phi in activations.PHIS.items() if phi.bounded)
KINKS = {"relu": (0.0,), "clip": (-1.5, 1.5)}
K, D, R = 3, 4, 2


def factors(seed, k=K, d=D, r=R, dtype=torch.float64):
    stream = torch.Generator().manual_seed(seed)
    A = torch.randn(k, r, generator=stream, dtype=dtype)
    return A, torch.randn(r, d, generator=stream, dtype=dtype)


def away_from_kinks(phi, inner):
    """Factors none of whose arguments is near a kink, so that finite differences are fair."""
    for seed in range(100):
        A, Bt = factors(seed)
        arguments = inner * (A @ Bt)
        gaps = [(arguments - kink).abs().min() for kink in KINKS.get(phi, ())]
        if all(gap > 0.02 for gap in gaps):
            return A.requires_grad_(), Bt.requires_grad_()
    raise AssertionError("no such factors")


@pytest.mark.parametrize("shape", [(5, D), (2, 3, D)], ids=["2d", "3d"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("outer", "inner"), [(2.0, 1.3), (0.05, 40.0)], ids=["absolute", "relative"]
)
@pytest.mark.parametrize("phi", PHIS)
def test_gradients_match_finite_differences(phi, outer, inner, bias, shape):
    A, Bt = away_from_kinks(phi, inner)
    stream = torch.Generator().manual_seed(9)
    x = torch.randn(shape, generator=stream, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(K, D, generator=stream, dtype=torch.float64)
    b = torch.randn(K, generator=stream, dtype=torch.float64) if bias else None
    start = away_from_kinks(phi, inner) if phi == "relu" else None

    def layer(x, A, Bt):
        return bounded_linear(x, weight, b, A, Bt, Bound(phi, outer, inner), start=start)

    assert layer(x, A, Bt).shape == (*shape[:-1], K)
    assert torch.autograd.gradcheck(layer, (x, A, Bt))


@pytest.mark.parametrize("phi", PHIS)
def test_the_product_is_the_merged_one(phi):
    A, Bt = factors(1)
    x = torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weight, bias = torch.ones(K, D, dtype=torch.float64), torch.arange(3.0, dtype=torch.float64)
    bound = Bound(phi, 0.7, 2.0)
    expected = x @ (weight + bounded_delta(A, Bt, bound)).T + bias
    torch.testing.assert_close(bounded_linear(x, weight, bias, A, Bt, bound), expected)


@pytest.mark.parametrize("phi", PHIS)
def test_phi_against_its_definition(phi):
    z = torch.linspace(-9, 9, 181, dtype=torch.float64)
    definitions = {
        "sine": z.sin(),
        "tanh": z.tanh(),
        "sigmoid": z.sigmoid() - 0.5,
        "relu": z.clamp_min(0),
        "clip": z.clamp(-1.5, 1.5),
        "identity": z,
    }
    bound = Bound(phi, 1.0, 1.0)
    torch.testing.assert_close(bound.value(z), definitions[phi])
    assert (bound.value(z).abs() <= bound.limit).all()
    assert math.isfinite(bound.limit) == (phi in BOUNDED)
    assert BOUNDED == ["clip", "sigmoid", "sine", "tanh"]


def test_sigmoid_does_not_cancel_near_zero():
    z = torch.tensor([1e-12, -3e-10, 1e-7])
    torch.testing.assert_close(Bound("sigmoid", 1.0, 1.0).value(z), z / 4, rtol=1e-6, atol=0.0)
    naive = z.sigmoid() - 0.5
    assert (naive[:2] == 0).all(), "the naive form would have lost these"


@settings(max_examples=60, deadline=None)
@given(
    phi=st.sampled_from(BOUNDED),
    scale=st.floats(-4, 6),
    outer=st.floats(1e-3, 1e2),
    inner=st.floats(1e-2, 1e3),
    clip=st.floats(0.1, 5),
    seed=st.integers(0, 2**20),
)
def test_entries_never_leave_the_bound(phi, scale, outer, inner, clip, seed):
    A, Bt = factors(seed, 9, 7, 3, torch.float32)
    bound = Bound(phi, outer, inner, clip)
    delta = bounded_delta(A * 10**scale, Bt, bound)
    assert delta.abs().max() <= outer * bound.limit * (1 + 1e-6)


def test_delta_keeps_its_precision_under_autocast():
    A, Bt = factors(3, 16, 16, 4, torch.float32)
    bound = Bound("sine", 2.0, 100.0)
    plain = bounded_delta(A, Bt, bound)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(bounded_delta(A, Bt, bound), plain)


@pytest.mark.parametrize("phi", PHIS)
def test_low_precision_weights_take_float32_factors(phi):
    A, Bt = factors(4, dtype=torch.float32)
    weight = torch.randn(K, D, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(2))
    bound = Bound(phi, 0.5, 1.0)
    low = bounded_linear(x.bfloat16(), weight.bfloat16(), None, A, Bt, bound)
    assert low.dtype == torch.bfloat16
    high = bounded_linear(x, weight, None, A, Bt, bound)
    torch.testing.assert_close(low.float(), high, rtol=0.05, atol=0.1)


def _dense_norm(A, Bt) -> float:
    return float(torch.linalg.matrix_norm(A.double() @ Bt.double()))


@settings(max_examples=60, deadline=None)
@given(scale_a=st.floats(-8, 8), scale_b=st.floats(-8, 8), seed=st.integers(0, 2**20))
def test_gram_norm_is_the_dense_norm(scale_a, scale_b, seed):
    A, Bt = factors(seed, 11, 6, 3, torch.float32)
    A, Bt = A * 10**scale_a, Bt * 10**scale_b
    assert float(gram_norm(A, Bt)) == pytest.approx(_dense_norm(A, Bt), rel=1e-6)


def test_gram_norm_survives_cancellation():
    """Columns that nearly cancel: float32 Gram matrices would be off by tens of percent."""
    stream = torch.Generator().manual_seed(0)
    column, row = torch.randn(50, 1, generator=stream), torch.randn(1, 40, generator=stream)
    noise = 1e-4 * torch.randn(1, 40, generator=stream)
    A, Bt = torch.cat([column, -column], 1) * 1e3, torch.cat([row, row + noise], 0)
    assert float(gram_norm(A, Bt)) == pytest.approx(_dense_norm(A, Bt), rel=1e-4)
    naive = float(((A.T @ A) * (Bt @ Bt.T)).sum().clamp_min(0).sqrt())
    assert naive != pytest.approx(_dense_norm(A, Bt), rel=1e-2)


def test_gram_norm_of_nothing_is_zero():
    assert float(gram_norm(torch.zeros(4, 2), torch.ones(2, 3))) == 0.0


def test_identity_equals_two_skinny_products():
    A, Bt = factors(5)
    x = torch.randn(6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = torch.zeros(K, D, dtype=torch.float64)
    out = bounded_linear(x, weight, None, A, Bt, Bound("identity", 2.0, 3.0))
    torch.testing.assert_close(out, 6.0 * F.linear(F.linear(x, Bt), A))
