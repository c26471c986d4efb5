"""Activations: the definition, bounds and precision of each; a new one is one record."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded import product
from stable_forgetting.common.bounded.attach import adapted_layers, attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.eager import gram_norm
from stable_forgetting.common.bounded.phi import PHIS, Bound, Phi
from stable_forgetting.common.bounded.product import bounded_delta, bounded_linear
from tests.common.made import normal

BOUNDED = sorted(name for name, phi in PHIS.items() if phi.bounded)
K, D, R = 3, 4, 2


def factors(seed, k=K, d=D, r=R, dtype=torch.float64):
    stream = torch.Generator().manual_seed(seed)
    A = torch.randn(k, r, generator=stream, dtype=dtype)
    return A, torch.randn(r, d, generator=stream, dtype=dtype)


@pytest.mark.parametrize("phi", [*PHIS])
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


OWN = Phi(
    "softsign",
    value=lambda z: z / (1 + z.abs()),
    slope_of_argument=lambda z, out: out.copy_(z).abs_().add_(1).pow_(-2),
    bound=1.0,
)


@pytest.fixture
def softsign(monkeypatch):
    monkeypatch.setitem(PHIS, OWN.name, OWN)
    return OWN.name


@pytest.mark.parametrize("options", [{}, {"split": True}], ids=["merged", "split"])
@pytest.mark.parametrize("tokens", [2, 5], ids=["few tokens", "many tokens"])
def test_gradients_of_a_registered_phi(softsign, tokens, options):
    shapes = [(tokens, 6), (9, 2), (2, 6)]
    inputs = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    weight, bound = normal(9, 6, seed=8), Bound(softsign, 0.7, 1.3)

    def layer(x, A, Bt):
        return bounded_linear(x, weight, None, A, Bt, bound, **options)

    assert torch.autograd.gradcheck(layer, inputs)


def test_an_adapter_of_a_registered_phi_trains_and_merges(softsign):
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2))
    config = AdapterConfig(phi=softsign, rank=2, omega=3.0, bound="relative")
    attach(model, ["0"], config, torch.Generator().manual_seed(0))
    x = normal(5, 6, seed=3).float()
    before = model(x).detach()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(x).square().sum().backward()
    optimizer.step()
    (_, layer), *_ = adapted_layers(model)
    after = model(x).detach()
    assert not torch.equal(before, after) and layer.delta().abs().max() <= layer.entry_bound
    torch.testing.assert_close(detach(model)(x), after)


def test_a_suite_names_a_registered_phi(softsign, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: digits-class\nsuite: mine\ncompare: []\n"
        "methods: {mine: {method: gd_sine, params: {adapter: {phi: softsign}}}}\n"
    )
    assert load_suite(str(path)).row("mine").config.adapter.phi == softsign


def test_a_phi_without_a_compiled_branch_leaves_the_kernels(softsign):
    triton = pytest.importorskip("stable_forgetting.common.bounded.triton")
    A = torch.zeros(4, 2)
    assert not triton._native(A, Bound(softsign, 1.0, 1.0))
    assert product._kernels(A.double(), torch.float64) is product.eager


def test_every_record_with_a_branch_and_none_besides():
    kernels = pytest.importorskip("stable_forgetting.common.bounded.kernels")
    assert {name for name, phi in PHIS.items() if not phi.linear} == kernels.BRANCHES


def test_an_unknown_phi_gets_a_hint():
    with pytest.raises(ConfigError, match="unknown phi 'sin'; did you mean 'sine'"):
        validate(AdapterConfig, {"phi": "sin"}, "x.yaml")


def test_a_record_is_registered_once_and_needs_one_slope():
    PHIS.register(OWN)
    try:
        assert PHIS[OWN.name] is OWN
        with pytest.raises(ConfigError, match="'softsign' is registered twice"):
            PHIS.register(OWN)
    finally:
        del PHIS[OWN.name]
    with pytest.raises(ConfigError, match="give slope_of_argument or slope_of_value"):
        Phi("flat", value=lambda z: z)
