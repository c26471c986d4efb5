"""A new activation is one record: configs, adapters, kernels and suites take it as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded import product
from stable_forgetting.common.bounded.attach import adapted_layers, attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.phi import PHIS, Bound, Phi
from stable_forgetting.common.bounded.product import bounded_linear

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


def draw(seed, *shape):
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"split": True}], ids=["merged", "split"])
@pytest.mark.parametrize("tokens", [2, 5], ids=["few tokens", "many tokens"])
def test_gradients_of_a_registered_phi(softsign, tokens, options):
    inputs = [draw(i, *s).requires_grad_() for i, s in enumerate([(tokens, 6), (9, 2), (2, 6)])]
    weight, bound = draw(8, 9, 6), Bound(softsign, 0.7, 1.3)

    def layer(x, A, Bt):
        return bounded_linear(x, weight, None, A, Bt, bound, **options)

    assert torch.autograd.gradcheck(layer, inputs)


def test_an_adapter_of_a_registered_phi_trains_and_merges(softsign):
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2))
    config = AdapterConfig(phi=softsign, rank=2, omega=3.0, bound="relative")
    attach(model, ["0"], config, torch.Generator().manual_seed(0))
    x = draw(3, 5, 6).float()
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
        _twice()
    finally:
        del PHIS[OWN.name]


def _twice():
    with pytest.raises(ConfigError, match="'softsign' is registered twice"):
        PHIS.register(OWN)
    with pytest.raises(ConfigError, match="give slope_of_argument or slope_of_value"):
        Phi("flat", value=lambda z: z)
