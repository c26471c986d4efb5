"""The adapted layer, and a training step of a model made of it, against its peers.

Peers: the same layer frozen (the floor), LoRA of the peft library, and the bounded layer written
as in its formula, ``W0 x + s phi(omega A B^T) x``, with two products.  In units of one k x d
product per token, forward and backward cost 2 (frozen), 2 (LoRA), 5 (naive) and 3 (one merged
product).

What a user of the layer sees stands here; :mod:`tools.perf.bounded_layer` measures its kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.common.bounded.polynomial import certified_reach
from stable_forgetting.vision.models.family import VIT
from tools.perf.counts import peak_bytes, saved_bytes, work
from tools.perf.measure import (
    Case,
    Check,
    Size,
    Variant,
    ViTSize,
    adamw_step,
    make_vit,
    relative_difference,
    seeded,
)

SIZES: dict[Size, ViTSize] = {
    "full": ViTSize(),
    "quick": ViTSize(batch=8),
    "tiny": ViTSize(image=8, dim=16, depth=1, heads=2, batch=2),
}
WIDE: dict[Size, tuple[tuple[int, int, int, int], ...]] = {
    "full": (
        *((768, 3072, rank, 512) for rank in (4, 8)),
        *((2048, 8192, rank, 512) for rank in (4, 8)),
        (4096, 11008, 4, 512),
    ),
    "quick": ((768, 3072, 4, 128),),
    "tiny": ((16, 24, 2, 4),),
}
"""Width in, width out, rank and tokens of layers for the polynomial path."""
REACH = 0.9
"""Certified |omega A B^T| of these layers: near the end of what degrees 1 and 3 reach."""
SINE = AdapterConfig(phi="sine", omega=100.0)
LORA = AdapterConfig()
VIT_MLP = r"blocks\.\d+\.mlp\.fc[12]"
OURS_SINE, OURS_LORA = "ours, sine", "ours, identity"
OURS_POLYNOMIAL = "ours, sine as a polynomial"
NAIVE, MERGED = "naive, sine", "merged, autograd"
PEFT, FROZEN = "PEFT LoRA", "frozen"
NAMES = (OURS_SINE, OURS_LORA, NAIVE, PEFT, FROZEN)
PAIRS = (
    (OURS_SINE, NAIVE),
    (OURS_SINE, PEFT),
    (OURS_LORA, PEFT),
    (OURS_SINE, FROZEN),
    (PEFT, FROZEN),
)


class NaiveBounded(nn.Module):
    """The formula read literally: one product for W0, one for the bounded update."""

    def __init__(self, layer: BoundedLinear):
        super().__init__()
        self.weight, self.bias, self.A, self.Bt = layer.weight, layer.bias, layer.A, layer.Bt
        self.outer, self.inner = layer.bound.outer, layer.bound.inner

    def delta(self) -> Tensor:
        """The update (k, d)."""
        return self.outer * torch.sin(self.inner * (self.A @ self.Bt))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k)."""
        return F.linear(x, self.weight, self.bias) + F.linear(x, self.delta())


class MergedBounded(NaiveBounded):
    """One product on ``W0 + dW``, differentiated by autograd: it keeps k x d matrices."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k)."""
        return F.linear(x, self.weight + self.delta(), self.bias)


def _peft(model: nn.Module, targets: str, rank: int) -> nn.Module:
    """Injects peft's LoRA of our scale into the modules that a regex matches."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise UserError("this benchmark compares with peft: pip install '.[dev]'") from None
    config = LoraConfig(
        r=rank, lora_alpha=int(LORA.alpha), lora_dropout=0.0, target_modules=targets
    )
    return inject_adapter_in_model(config, model)


def _moved(model: nn.Module) -> nn.Module:
    """Gives A entries of 1e-3: with its A = 0 an adapter has nothing to differ in."""
    for name, layer in adapted_layers(model):
        draw = torch.randn(layer.A.shape, generator=generator(0, "perf", name))
        layer.A.data.copy_(1e-3 * draw)
    return model


def _same_factors(peft: nn.Module, ours: nn.Module) -> None:
    """Copies our factors into peft's (their B is our A, their A our Bt)."""
    for name, layer in adapted_layers(ours):
        theirs = peft.get_submodule(name)
        theirs.lora_B["default"].weight.data.copy_(layer.A.data)  # type: ignore[union-attr,index]
        theirs.lora_A["default"].weight.data.copy_(layer.Bt.data)  # type: ignore[union-attr,index]


def written_out(model: nn.Module, kind: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy of the model with layers of ``kind`` in the place of ours."""
    copied = copy.deepcopy(model)
    for name, layer in list(adapted_layers(copied)):
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, kind(layer))
    return copied


def variants_of(
    base: nn.Module,
    patterns: tuple[str, ...],
    regex: str,
    names: Sequence[str] = NAMES,
    rank: int = SINE.rank,
) -> dict[str, nn.Module]:
    """Name -> model, all on the weights of ``base``, which is not changed."""
    frozen = copy.deepcopy(base).requires_grad_(False)
    models = {FROZEN: frozen}
    for name, preset in ((OURS_SINE, SINE), (OURS_LORA, LORA)):
        models[name] = copy.deepcopy(frozen)
        config = preset.model_copy(update={"rank": rank})
        attach(models[name], patterns, config, generator(0, "perf", "factors"))
        _moved(models[name])
    models[NAIVE] = written_out(models[OURS_SINE], NaiveBounded)
    models[MERGED] = written_out(models[OURS_SINE], MergedBounded)
    models[PEFT] = _peft(copy.deepcopy(frozen), regex, rank)
    _same_factors(models[PEFT], models[OURS_LORA])
    return {name: models[name] for name in names}


def _agreement(models: dict[str, nn.Module], x: Tensor) -> list[Check]:
    """Outputs of ours against those of the peer with the same factors."""
    with torch.no_grad():
        out = {name: model(x) for name, model in models.items()}
    return [
        Check("sine = naive (rel.)", relative_difference(out[OURS_SINE], out[NAIVE]), 1e-5),
        Check("identity = PEFT (rel.)", relative_difference(out[OURS_LORA], out[PEFT]), 1e-5),
    ]


def _variant(
    name: str, run: Callable[[], object], forward: Callable[[], Tensor], operands: Sequence[Tensor]
) -> Variant:
    saved, peak = saved_bytes(forward, operands), peak_bytes(run)
    return Variant(name, run, {"saved MB": saved / 1e6, "peak MB": peak / 1e6, **work(run)})


def layer_variants(models: Mapping[str, nn.Module], x: Tensor, upstream: Tensor) -> list[Variant]:
    """Forward and backward of one layer; the input requires a gradient, as inside a model."""

    def variant(name: str, model: nn.Module) -> Variant:
        asked = [x, *(p for p in model.parameters() if p.requires_grad)]
        backward = partial(torch.autograd.grad, inputs=asked, grad_outputs=upstream)
        operands = [x, *model.parameters()]
        return _variant(name, lambda: backward(model(x)), lambda: model(x), operands)

    return [variant(name, model) for name, model in models.items()]


def step_variants(
    models: Mapping[str, nn.Module], loss: Callable[[nn.Module], Tensor], anchor: str
) -> list[Variant]:
    """Forward, backward and AdamW.

    The parameter ``anchor`` before the first block is trained in every variant, so that gradients
    reach that block in the frozen one too.
    """

    def variant(name: str, model: nn.Module) -> Variant:
        model.get_parameter(anchor).requires_grad_(True)
        run = adamw_step(model, lambda: loss(model))
        run()  # the optimizer's state is made in the first step
        operands = [*model.parameters(), *model.buffers()]
        return _variant(name, run, lambda: loss(model), operands)

    return [variant(name, model) for name, model in models.items()]


def linear(d: int, k: int) -> nn.Module:
    """One layer ``d -> k``, always of the same weights."""
    with seeded():
        return nn.Sequential(nn.Linear(d, k))


def layer(size: Size) -> Iterator[Case]:
    """Forward and backward of one ``mlp.fc1``."""
    vit = SIZES[size]
    stream = generator(0, "perf", "layer")
    models = variants_of(linear(vit.dim, 4 * vit.dim), ("0",), "0")
    x = torch.randn(vit.batch, vit.tokens, vit.dim, generator=stream).requires_grad_()
    upstream = torch.randn(vit.batch, vit.tokens, 4 * vit.dim, generator=stream)
    variants = layer_variants(models, x, upstream)
    count = vit.batch * vit.tokens
    title = f"one layer {vit.dim} -> {4 * vit.dim}, {count} tokens, r = {SINE.rank}: fwd + bwd"
    yield Case("adapter_layer", title, variants, PAIRS, _agreement(models, x), "call", share=0.6)


def wide(size: Size) -> Iterator[Case]:
    """Forward and backward of wide layers: the exact path, the polynomial one, PEFT's LoRA."""
    for d, k, rank, tokens in WIDE[size]:
        models = variants_of(linear(d, k), ("0",), "0", (OURS_SINE, PEFT, FROZEN), rank)
        models[OURS_POLYNOMIAL] = copy.deepcopy(models[OURS_SINE])
        for name, mode in ((OURS_SINE, "merged"), (OURS_POLYNOMIAL, "polynomial")):
            ((_, adapted),) = adapted_layers(models[name])
            adapted.config = adapted.config.model_copy(update={"mode": mode})
            reach = certified_reach(adapted.A, adapted.Bt, adapted.bound.inner)
            adapted.A.data.mul_(REACH / reach)
        stream = generator(0, "perf", "wide")
        x = torch.randn(tokens, d, generator=stream).requires_grad_()
        upstream = torch.randn(tokens, k, generator=stream)
        with torch.no_grad():
            exact, made, base = (models[n](x) for n in (OURS_SINE, OURS_POLYNOMIAL, FROZEN))
        ((_, changed),) = adapted_layers(models[OURS_POLYNOMIAL])
        fitted = changed.polynomial()
        assert fitted is not None, "the factors are within the polynomial's reach"
        error = relative_difference(made - base, exact - base)
        checks = [Check("polynomial = exact update (rel.)", error, fitted.error)]
        pairs = ((OURS_POLYNOMIAL, PEFT), (OURS_SINE, PEFT), (PEFT, FROZEN))
        title = f"one layer {d} -> {k}, {tokens} tokens, r = {rank}: fwd + bwd"
        yield Case(
            "adapter_wide", title, layer_variants(models, x, upstream), pairs, checks, "call"
        )


def step(size: Size) -> Iterator[Case]:
    """Forward, backward and AdamW step with adapters on all MLP layers."""
    vit = SIZES[size]
    models = variants_of(make_vit(vit), VIT.mlp, VIT_MLP)
    stream = generator(0, "perf", "step")
    images = torch.randn(vit.batch, vit.channels, vit.image, vit.image, generator=stream)
    labels = torch.randint(0, vit.classes, (vit.batch,), generator=stream)
    checks = _agreement(models, images)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), labels)

    variants = step_variants(models, loss, "pos_embed")
    title = f"training step, adapters on the MLPs: {vit}"
    yield Case("adapter_step", title, variants, PAIRS, checks, unit="step")
