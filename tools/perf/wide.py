"""Wide layers: the exact path, the polynomial one and PEFT's LoRA, by tokens and rank.

The factors are scaled so that the certified argument of phi is :data:`REACH`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.common.bounded.polynomial import certified_reach
from tools.perf.layers import ONE, OURS_SINE, PEFT, layer_runs, linear, variants_of
from tools.perf.timing import Case, adamw_step, apart, mflop, seeded

EXACT, POLYNOMIAL = "exact", "polynomial"
REACH = 0.9
"""Certified |omega A B^T|: near the end of what degrees 1 and 3 reach."""
WIDTH, INNER = 2048, 8192
TOKENS, RANKS = (512, 1576, 4096), (4, 8, 16)
PAIRS = ((POLYNOMIAL, PEFT), (EXACT, PEFT))
GOALS = {(POLYNOMIAL, PEFT): 1.05}
ROUNDS = 2


def adapter_wide(quick: bool) -> Iterator[Case]:
    """Forward and backward of a layer, then steps of a block all of whose products are adapted."""
    width, inner = (16, 24) if quick else (WIDTH, INNER)
    for tokens in (4,) if quick else TOKENS:
        for rank in (2,) if quick else RANKS:
            yield _layer(width, inner, tokens, rank)
            yield _step(width, tokens, rank)


def _layer(d: int, k: int, tokens: int, rank: int) -> Case:
    models = _models(linear(d, k), rank)
    stream = generator(0, "perf", "wide")
    x = torch.randn(tokens, d, generator=stream).requires_grad_()
    runs = layer_runs(models, x, torch.randn(tokens, k, generator=stream))
    with torch.no_grad():
        made, exact = (_update(models[name], x) for name in (POLYNOMIAL, EXACT))
    check = {"polynomial = exact update (rel.)": (apart(made, exact), _error(models))}
    title = f"one layer {d} -> {k}, {tokens} tokens, r = {rank}: forward and backward"
    counts = {name: _counts(models[name], mflop(run)) for name, run in runs.items()}
    name = f"wide_layer_{tokens}_r{rank}"
    return Case(name, title, runs, PAIRS, check, counts, "call", goals=GOALS, rounds=ROUNDS)


def _step(width: int, tokens: int, rank: int) -> Case:
    with seeded():
        layers = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)]
        base = nn.Sequential(nn.LayerNorm(width), *layers)
    models = _models(base, rank, (("1", "3"), "[13]"))
    stream = generator(0, "perf", "wide")
    x, y = (torch.randn(tokens, width, generator=stream) for _ in range(2))

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(x + model(x), y)

    with torch.no_grad():
        made, exact = loss(models[POLYNOMIAL]), loss(models[EXACT])
    limit = 4 * _error(models)  # an allowance, no bound: two layers, a squared loss
    check = {"same loss (rel.)": (apart(made, exact), limit)}
    runs, counts = {}, {}
    for name, model in models.items():
        model.get_parameter("0.weight").requires_grad_(True)  # so that gradients go through both
        runs[name] = adamw_step(model, partial(loss, model))
        counts[name] = _counts(model, mflop(runs[name]))
    title = f"training step, two layers {width} -> {width}, {tokens} tokens, r = {rank}"
    name = f"wide_step_{tokens}_r{rank}"
    return Case(name, title, runs, PAIRS, check, counts, "step", goals=GOALS, rounds=ROUNDS)


def _models(
    base: nn.Module, rank: int, targets: tuple[tuple[str, ...], str] = ONE
) -> dict[str, nn.Module]:
    made = variants_of(base, targets, (OURS_SINE, PEFT), rank)
    models = {EXACT: made[OURS_SINE], POLYNOMIAL: copy.deepcopy(made[OURS_SINE]), PEFT: made[PEFT]}
    for name, mode in ((EXACT, "merged"), (POLYNOMIAL, "polynomial")):
        for _, layer in adapted_layers(models[name]):
            layer.config = layer.config.model_copy(update={"mode": mode})
            layer.A.data.mul_(REACH / certified_reach(layer.A, layer.Bt, layer.bound.frequency))
    return models


def _update(model: nn.Module, x: Tensor) -> Tensor:
    """What a layer's dW adds."""
    ((_, layer),) = adapted_layers(model)
    return model(x) - F.linear(x, layer.weight, layer.bias)


def _error(models: Mapping[str, nn.Module]) -> float:
    """Of an entry of dW, as the polynomial states it."""
    return max(_fitted(layer)[1] for _, layer in adapted_layers(models[POLYNOMIAL]))


def _fitted(layer: BoundedLinear) -> tuple[int, float]:
    """Columns of the low-rank product, and its error."""
    fitted = layer.polynomial()
    assert fitted is not None, "the factors are within the polynomial's reach"
    return fitted.columns(layer.config.rank), fitted.error


def _counts(model: nn.Module, products: float) -> dict[str, float]:
    columns = [
        _fitted(layer)[0] for _, layer in adapted_layers(model) if layer.config.mode == "polynomial"
    ]
    return {"MFLOP": products, **({"columns": columns[0]} if columns else {})}
