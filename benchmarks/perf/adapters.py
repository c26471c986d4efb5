"""The adapted layer, and a training step of a model made of it, against its peers.

Peers: the same layer frozen (the floor), LoRA of the peft library, and the bounded layer written
as in its formula, ``W0 x + s phi(omega A B^T) x``, with two products.  In units of one k x d
product per token, forward and backward cost 2 (frozen), 2 (LoRA), 5 (naive) and 3 (one merged
product).

The kernel that replaces :func:`common.bounded.product.bounded_linear` has a benchmark of its own
shapes; here stands what a user of the layer sees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.perf.counts import saved_bytes, work
from benchmarks.perf.measure import (
    Case,
    Check,
    Size,
    Variant,
    ViTSize,
    make_vit,
    relative_difference,
)
from common.base.errors import UserError
from common.base.seeding import generator
from common.bounded.attach import attach
from common.bounded.config import AdapterConfig
from common.bounded.find import adapted_layers
from common.bounded.layer import BoundedLinear
from vision.models.family import VIT

SIZES: dict[Size, ViTSize] = {
    "full": ViTSize(),
    "quick": ViTSize(batch=8),
    "tiny": ViTSize(image=8, dim=16, depth=1, heads=2, batch=2),
}
SINE = AdapterConfig(phi="sine", omega=100.0)
LORA = AdapterConfig()
OURS_SINE, OURS_LORA = "ours, sine", "ours, identity"
NAIVE, PEFT, FROZEN = "naive, sine", "PEFT LoRA", "frozen"
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

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k)."""
        delta = self.outer * torch.sin(self.inner * (self.A @ self.Bt))
        return F.linear(x, self.weight, self.bias) + F.linear(x, delta)


def _peft(model: nn.Module, targets: str) -> nn.Module:
    """Injects peft's LoRA of the same rank and scale into the modules that a regex matches."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise UserError("this benchmark compares with peft: pip install '.[dev]'") from None
    config = LoraConfig(
        r=LORA.rank, lora_alpha=int(LORA.alpha), lora_dropout=0.0, target_modules=targets
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


def variants_of(base: nn.Module, patterns: tuple[str, ...], regex: str) -> dict[str, nn.Module]:
    """The five models on the same weights, in the order of the tables; ``base`` is not changed."""
    frozen = copy.deepcopy(base).requires_grad_(False)
    models = {}
    for name, config in ((OURS_SINE, SINE), (OURS_LORA, LORA)):
        models[name] = copy.deepcopy(frozen)
        attach(models[name], patterns, config, generator(0, "perf", "factors"))
        _moved(models[name])
    models[NAIVE] = copy.deepcopy(models[OURS_SINE])
    for name, layer in list(adapted_layers(models[NAIVE])):
        parent, _, child = name.rpartition(".")
        setattr(models[NAIVE].get_submodule(parent), child, NaiveBounded(layer))
    models[PEFT] = _peft(copy.deepcopy(frozen), regex)
    _same_factors(models[PEFT], models[OURS_LORA])
    models[FROZEN] = frozen
    return models


def _agreement(models: dict[str, nn.Module], x: Tensor) -> list[Check]:
    """Outputs of ours against those of the peer with the same factors."""
    with torch.no_grad():
        out = {name: model(x) for name, model in models.items()}
    return [
        Check("sine = naive (rel.)", relative_difference(out[OURS_SINE], out[NAIVE]), 1e-5),
        Check("identity = PEFT (rel.)", relative_difference(out[OURS_LORA], out[PEFT]), 1e-5),
    ]


def _counts(
    forward: Callable[[], Tensor], run: Callable[[], object], operands: list[Tensor]
) -> dict[str, float]:
    return {"saved MB": saved_bytes(forward, operands) / 1e6, **work(run)}


def layer(size: Size) -> Iterator[Case]:
    """Forward and backward of one ``mlp.fc1``; the input requires a gradient, as inside a model."""
    vit = SIZES[size]
    stream = generator(0, "perf", "layer")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        base = nn.Sequential(nn.Linear(vit.dim, 4 * vit.dim))
    models = variants_of(base, ("0",), "0")
    x = torch.randn(vit.batch, vit.tokens, vit.dim, generator=stream).requires_grad_()
    upstream = torch.randn(vit.batch, vit.tokens, 4 * vit.dim, generator=stream)
    variants = [_layer_variant(name, model, x, upstream) for name, model in models.items()]
    count = vit.batch * vit.tokens
    title = f"one layer {vit.dim} -> {4 * vit.dim}, {count} tokens, r = {SINE.rank}: fwd + bwd"
    yield Case("adapter_layer", title, variants, PAIRS, _agreement(models, x), "call", share=0.6)


def _layer_variant(name: str, model: nn.Module, x: Tensor, upstream: Tensor) -> Variant:
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]

    def run() -> object:
        return torch.autograd.grad(model(x), wanted, upstream)

    return Variant(name, run, _counts(lambda: model(x), run, [x, *model.parameters()]))


def step(size: Size) -> Iterator[Case]:
    """Forward, backward and AdamW step with adapters on all MLP layers.

    Position embeddings are trained in every variant, so that gradients reach the first block in
    the frozen one too.
    """
    vit = SIZES[size]
    models = variants_of(make_vit(vit), VIT.mlp, r"blocks\.\d+\.mlp\.fc[12]")
    stream = generator(0, "perf", "step")
    images = torch.randn(vit.batch, vit.channels, vit.image, vit.image, generator=stream)
    labels = torch.randint(0, vit.classes, (vit.batch,), generator=stream)
    checks = _agreement(models, images)
    variants = [_step_variant(name, model, images, labels) for name, model in models.items()]
    title = f"training step, adapters on the MLPs: {vit}"
    yield Case("adapter_step", title, variants, PAIRS, checks, unit="step")


def _step_variant(name: str, model: nn.Module, images: Tensor, labels: Tensor) -> Variant:
    model.get_parameter("pos_embed").requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def forward() -> Tensor:
        return F.cross_entropy(model(images), labels)

    def run() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    run()  # the optimizer's state is made in the first step
    operands = [images, labels, *model.parameters(), *model.buffers()]
    return Variant(name, run, _counts(forward, run, operands))
