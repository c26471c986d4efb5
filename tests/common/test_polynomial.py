"""The bounded update as a low-rank product of monomials: its error, its switch, its size."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stable_forgetting.common import AdapterConfig
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded import polynomial
from stable_forgetting.common.bounded.attach import attach, detach
from stable_forgetting.common.bounded.eager import Update
from stable_forgetting.common.bounded.layer import BoundedLinear, reuse_weights
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.bounded.polynomial import (
    TOLERANCE,
    OddPolynomial,
    certified_reach,
    odd_polynomial,
)
from stable_forgetting.common.bounded.statistics import adapter_statistics
from tests.common.made import stream

D, K = 40, 56


def layer_at(reach: float, *, phi="sine", mode="polynomial", rank=4, dtype=torch.float64, **over):
    """A layer whose certified |z| is ``reach``."""
    torch.manual_seed(0)
    base = nn.Linear(D, K).to(dtype)
    config = AdapterConfig(phi=phi, omega=100.0, rank=rank, mode=mode, **over)
    layer = BoundedLinear(base, config, stream(1)).to(dtype)
    with torch.no_grad():
        layer.A.copy_(torch.randn(K, rank, generator=stream(2)))
        layer.A.mul_(reach / certified_reach(layer.A, layer.Bt, layer.bound.frequency))
    return layer


def gradients(layer: BoundedLinear) -> list[torch.Tensor]:
    """The output's part from dW, and the gradients of x (from dW), A and Bt."""
    x = torch.randn(9, D, generator=stream(3), dtype=torch.float64).requires_grad_()
    g = torch.randn(9, K, generator=stream(4), dtype=torch.float64)
    y = layer(x)
    y.backward(g)
    return [
        (y - F.linear(x, layer.weight, layer.bias)).detach(),
        x.grad - g @ layer.weight,
        layer.A.grad,
        layer.Bt.grad,
    ]


def slope_error(phi: str, fitted: OddPolynomial, reach: float) -> float:
    """Largest |p'(z) - phi'(z)|, which bounds the error of a gradient's factor."""
    z = torch.linspace(reach / 2000, reach, 2000, dtype=torch.float64, requires_grad=True)
    made = sum(a * z**n for a, n in zip(fitted.coefficients, fitted.degrees, strict=True))
    (slopes,) = torch.autograd.grad((made - PHIS[phi].value(z)).sum(), z)
    return float(slopes.abs().max())


@pytest.mark.parametrize("phi", ["sine", "tanh"])
@pytest.mark.parametrize("reach", [0.01, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_update_and_gradients_stay_within_the_stated_error(phi, reach, rank):
    layer = layer_at(reach, phi=phi, rank=rank)
    fitted = layer.polynomial()
    assert fitted is not None and fitted.error <= TOLERANCE
    made, exact = gradients(layer), gradients(layer_at(reach, phi=phi, rank=rank, mode="merged"))
    relative = [float((a - b).norm() / b.norm()) for a, b in zip(made, exact, strict=True)]
    assert max(relative[:2]) <= fitted.error
    assert max(relative[2:]) <= fitted.error + slope_error(phi, fitted, reach)


def test_each_entry_of_the_update_is_within_the_stated_error():
    for reach in (0.3, 1.0, 1.9):
        layer = layer_at(reach)
        fitted = layer.polynomial()
        made = layer(torch.eye(D, dtype=torch.float64)).T - layer.weight - layer.bias[:, None]
        assert ((made - layer.delta()).abs() <= fitted.error * layer.delta().abs() + 1e-13).all()


def test_the_reach_is_an_upper_bound():
    for seed in range(20):
        A, Bt = torch.randn(30, 3, generator=stream(seed)), torch.randn(3, 20, generator=stream(99))
        assert float((7 * A @ Bt).abs().max()) <= certified_reach(A, Bt, 7.0) * (1 + 1e-6)


def test_beyond_the_last_polynomial_the_exact_product_takes_over_without_a_jump():
    limit = max(r / 100 for r in range(100, 400) if odd_polynomial("sine", r / 100) is not None)
    edge = 2.0 ** (math.floor(4 * math.log2(limit)) / 4)
    below, above = layer_at(edge * 0.9999), layer_at(edge * 1.0001)
    assert below.polynomial() is not None and above.polynomial() is None
    x = torch.randn(50, D, generator=stream(5), dtype=torch.float64)
    low, high = (layer(x) - F.linear(x, layer.weight, layer.bias) for layer in (below, above))
    assert (low - high).norm().item() / high.norm().item() <= TOLERANCE + 2e-4


def test_a_start_is_subtracted_and_counts_for_the_reach():
    layer = layer_at(0.5)
    layer.set_start_(layer.A.detach().clone(), layer.Bt.detach().clone())
    x = torch.randn(5, D, generator=stream(6), dtype=torch.float64)
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-12)
    with torch.no_grad():
        layer.A.mul_(0.5)
    exact = F.linear(x, layer.weight + layer.delta(), layer.bias)
    scale = (exact - F.linear(x, layer.weight, layer.bias)).norm().item()
    assert (layer(x) - exact).norm().item() <= 4 * layer.polynomial().error * scale
    with torch.no_grad():
        layer.A0.mul_(100)
        layer.A.mul_(1.0)
    assert layer.polynomial() is None


class Sizes(TorchDispatchMode):
    """Notes the largest tensor that is made, and every product of matrices."""

    def __init__(self):
        super().__init__()
        self.largest, self.multiplications = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(made, torch.Tensor) and "view" not in name and name != "t":
            self.largest = max(self.largest, made.numel())
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            self.multiplications += left.shape[0] * left.shape[1] * right.shape[1]
        return made


def counted(mode: str, tokens: int) -> Sizes:
    layer = layer_at(0.9, mode=mode, dtype=torch.float32)
    x = torch.randn(tokens, D, requires_grad=True)
    with Sizes() as sizes:
        layer(x).sum().backward()
    return sizes


def test_no_dense_matrix_is_made_and_two_square_products_do():
    """Forward and the gradient of x: one square product each; the exact path takes a third."""
    tokens = 12
    sizes, columns = counted("polynomial", tokens), odd_polynomial("sine", 1.0).columns(4)
    assert sizes.largest < D * K
    assert sizes.multiplications == 2 * tokens * D * K + 3 * tokens * columns * (D + K)


@pytest.mark.parametrize(
    ("rank", "k", "d", "taken"),
    [(4, 11008, 4096, True), (8, 11008, 4096, True), (4, 384, 96, False), (8, 3072, 768, False)],
)
def test_auto_takes_the_cheaper_path(rank, k, d, taken):
    A, Bt = torch.zeros(k, rank), torch.zeros(rank, d)
    A[0], Bt[:, 0] = 0.9, 1 / rank
    bound = layer_at(0.1).bound._replace(frequency=1.0)
    update = Update(A, Bt, bound)
    assert (polynomial.choose(update, by_cost=True) is not None) == taken
    assert polynomial.choose(update, by_cost=False) is not None


def test_a_phi_without_a_polynomial_is_refused_or_exact():
    with pytest.raises(ConfigError, match="mode: polynomial takes phi: sine or tanh; use mode: a"):
        validate(AdapterConfig, {"phi": "sigmoid", "mode": "polynomial"}, "adapter")
    assert layer_at(0.1, phi="sigmoid", mode="auto").polynomial() is None


def test_micro_batches_share_the_certificate(monkeypatch):
    layer, asked = layer_at(0.2), []
    monkeypatch.setattr(
        "stable_forgetting.common.bounded.layer.choose",
        lambda *a, **k: asked.append(1) or polynomial.choose(*a, **k),
    )
    x = torch.zeros(2, D, dtype=torch.float64)
    with reuse_weights(layer):
        layer(x), layer(x)
        assert len(asked) == 1
    with torch.no_grad():
        layer.A.add_(1.0)
    layer(x)
    assert len(asked) == 2 and layer.polynomial() is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_the_optimizer_is_certified(fused):
    """A fused optimizer changes the factors without telling torch's version counter."""
    layer, exact = layer_at(0.2, phi="tanh"), layer_at(0.2, phi="tanh", mode="merged")
    x, before = torch.ones(2, D, dtype=torch.float64), layer.polynomial()
    for one in (layer, exact):
        optimizer = torch.optim.AdamW([one.A, one.Bt], lr=1.0, fused=fused)
        one(x).sum().backward()
        optimizer.step()
    assert before is not None and layer.polynomial() is None
    assert torch.allclose(layer(x), exact(x), rtol=1e-2)


def test_the_record_says_how_many_layers_and_which_error():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    attach(model, ["?"], AdapterConfig(phi="sine", omega=100.0, mode="polynomial"), stream(0))
    with torch.no_grad():
        model[0].A.fill_(10.0)
        model[1].A.fill_(1e-3)
    said = adapter_statistics(model)
    assert said["polynomial_layers"] == 0.5
    assert said["polynomial_error"] == model[1].polynomial().error > 0
    x = torch.randn(3, 8)
    before = model(x)
    assert torch.allclose(detach(model)(x), before, rtol=1e-2, atol=1e-2)


def test_low_precision_weights_keep_the_update_apart_where_it_is_exact():
    layer = layer_at(9.0, dtype=torch.float32)
    layer.weight.data = layer.weight.data.to(torch.bfloat16)
    layer.bias.data = layer.bias.data.to(torch.bfloat16)
    assert layer.polynomial() is None and layer.split
    assert not layer_at(9.0, dtype=torch.float32).split
