"""The kernel: gradients, bounds and precision of every phi."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stable_forgetting.common.bounded import phi as activations
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.product import bounded_delta, gram_norm

PHIS = tuple(activations.PHIS)
BOUNDED = sorted(name for name, phi in activations.PHIS.items() if phi.bounded)
K, D, R = 3, 4, 2


def factors(seed, k=K, d=D, r=R, dtype=torch.float64):
    stream = torch.Generator().manual_seed(seed)
    A = torch.randn(k, r, generator=stream, dtype=dtype)
    return A, torch.randn(r, d, generator=stream, dtype=dtype)


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


def test_delta_keeps_its_precision_under_autocast():
    A, Bt = factors(3, 16, 16, 4, torch.float32)
    bound = Bound("sine", 2.0, 100.0)
    plain = bounded_delta(A, Bt, bound)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(bounded_delta(A, Bt, bound), plain)


def _dense_norm(A, Bt) -> float:
    return float(torch.linalg.matrix_norm(A.double() @ Bt.double()))


@settings(max_examples=60, deadline=None)
@given(scale_a=st.floats(-8, 8), scale_b=st.floats(-8, 8), seed=st.integers(0, 2**20))
def test_gram_norm_is_the_dense_norm(scale_a, scale_b, seed):
    A, Bt = factors(seed, 11, 6, 3, torch.float32)
    A, Bt = A * 10**scale_a, Bt * 10**scale_b
    assert float(gram_norm(A, Bt)) == pytest.approx(_dense_norm(A, Bt), rel=1e-6)


def test_gram_norm_of_nothing_is_zero():
    assert float(gram_norm(torch.zeros(4, 2), torch.ones(2, 3))) == 0.0
