"""``torch.compile`` keeps a bounded layer in one graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stable_forgetting.common.bounded.attach import adapted_layers, attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import reuse_weights
from stable_forgetting.common.bounded.phi import Bound

WAYS = {
    "merged": {"phi": "sine", "omega": 30.0},
    "split": {"phi": "tanh", "mode": "split", "dropout": 0.5},
    "start": {"phi": "relu"},
    "lora": {},
}


def adapted(**fields):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 5))
        attach(model, ("0", "2"), AdapterConfig(rank=2, **fields), torch.Generator())
        for _, layer in adapted_layers(model):
            layer.A.data.add_(0.1 * torch.randn_like(layer.A))
    return model


def results(run, model, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # of dropout
        y = run(x)
        asked = [x, *(p for p in model.parameters() if p.requires_grad)]
        return [y, *torch.autograd.grad(y.square().sum(), asked)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")  # what the compiler's own imports deprecate
def test_there_is_no_graph_break(way):
    """And outputs and gradients have the same bits."""
    model, x = adapted(**WAYS[way]), torch.randn(7, 6, requires_grad=True)
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(x).graph_break_count == 0
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = results(model, model, x)
    for found in (results(whole, model, x), scoped(whole, model, x)):
        for mine, plain in zip(found, expected, strict=True):
            assert torch.equal(mine, plain)


def scoped(whole, model, x):
    with reuse_weights(model):
        return results(whole, model, x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", [False, True])
def test_torch_finds_nothing_wrong_with_the_operators(start):
    """Schema, and shapes without memory, by torch's own check; autograd is the function's."""

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    x, weight, A, Bt = draw(4, 7, 6), draw(20, 6), draw(20, 2), draw(2, 6)
    first = (draw(20, 2), draw(2, 6)) if start else (None, None)
    form, bias, needs = Bound("sine", 0.7, 1.3), draw(20), [True, False, True, True, True]
    given = (x, weight, A, Bt, *first, None, *form)
    operators = torch.ops.stable_forgetting
    torch.library.opcheck(operators.bounded_linear.default, (*given, bias, x.dtype))
    grad = draw(4, 7, 20)
    torch.library.opcheck(operators.bounded_linear_backward.default, (*given, grad, needs))
