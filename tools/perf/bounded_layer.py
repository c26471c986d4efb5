"""The kernel of the bounded layer on the shapes that it is for, and whole training steps with it.

Peers: the naive layer (dense temporaries and two products), the merged product left to autograd,
LoRA of the peft library, and the frozen layer.  In units of one k x d product per token, forward
and backward cost 3 (ours, merged), 5 (naive), 2 (LoRA) and 2 (frozen): LoRA's time is out of reach
of any exact bounded layer, except for what LoRA loses elsewhere.

Goals are limits on ratios of medians of CPU time.  They are reported, met or missed; no test and no
exit code depends on them.

Steps run on the system's allocator, as a user's do.  Layers run last, on one that keeps large
blocks: glibc maps buffers of some 20-32 MB anew in every call or keeps them, depending on what the
process did before, which moves a layer's time by up to a third (``MALLOC_MMAP_MAX_=0
MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456`` asks for the same from outside).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.vision.models.family import VIT
from tools.perf.adapters import (
    FROZEN,
    MERGED,
    NAIVE,
    OURS_SINE,
    PEFT,
    SINE,
    VIT_MLP,
    layer_variants,
    linear,
    step_variants,
    variants_of,
)
from tools.perf.measure import (
    Case,
    Check,
    Size,
    Variant,
    relative_difference,
    seeded,
)

NAMES = (OURS_SINE, NAIVE, MERGED, PEFT, FROZEN)
PAIRS = (
    (OURS_SINE, NAIVE),
    (OURS_SINE, PEFT),
    (OURS_SINE, MERGED),
    (OURS_SINE, FROZEN),
    (PEFT, FROZEN),
)
STEP_GOALS = {(OURS_SINE, NAIVE): 0.75, (OURS_SINE, PEFT): 1.25}
FORWARD_GOALS = {(OURS_SINE, PEFT): 1.05}
FORWARD_TOKENS = 1576
"""Forward passes alone are measured, and have a goal, from here on (a batch of 8 images)."""


@dataclass(frozen=True)
class Shape:
    """A layer ``d -> k`` and token counts; those of a ViT-B are GPT-Neo-125M's too."""

    name: str
    k: int
    d: int
    tokens: tuple[int, ...]


LAYERS: dict[Size, tuple[Shape, ...]] = {
    "full": (
        Shape("vit_s_fc1", 1536, 384, (512, 1576, 4096)),
        Shape("vit_s_fc2", 384, 1536, (1576,)),
        Shape("vit_b_fc1", 3072, 768, (512, 1576)),
        Shape("vit_b_fc2", 768, 3072, (1576,)),
        Shape("phi_1_5_fc1", 8192, 2048, (512, 1024)),
    ),
    "quick": (Shape("vit_s_fc1", 1536, 384, (512, 1576)), Shape("vit_b_fc2", 768, 3072, (512,))),
    "tiny": (Shape("tiny_fc1", 96, 24, (8, FORWARD_TOKENS)),),
}


@dataclass(frozen=True)
class StepSize:
    """Models of the full steps: a timm name and its batch, and a GPT-Neo from scratch."""

    vit: str
    images: int
    width: int
    depth: int
    vocabulary: int
    texts: int
    length: int
    heads: int = 12


STEPS: dict[Size, StepSize] = {
    "full": StepSize("vit_small_patch16_224", 4, 768, 2, 4096, 2, 512),
    "quick": StepSize("vit_tiny_patch16_224", 2, 768, 2, 4096, 1, 128),
    "tiny": StepSize("test_vit", 2, 24, 2, 32, 2, 8, heads=2),
}
GPT_MLP = (("*.mlp.c_fc", "*.mlp.c_proj"), r".*\.mlp\.c_(fc|proj)")
GPT_ALL = (
    (*GPT_MLP[0], "*.attention.*_proj"),
    r".*\.(mlp\.c_(fc|proj)|attention\.(k|v|q|out)_proj)",
)


def cases(size: Size) -> Iterator[Case]:
    """Full steps, then layers."""
    yield from _steps(size)
    for shape in LAYERS[size]:
        for tokens in shape.tokens:
            yield from _layer(shape, tokens)


# Full steps --------------------------------------------------------------------------------------


def _steps(size: Size) -> Iterator[Case]:
    sizes = STEPS[size]
    yield _vit_step(sizes)
    for name, targets in (("mlp", GPT_MLP), ("all", GPT_ALL)):
        yield _gpt_neo_step(sizes, name, targets)


def _vit_step(sizes: StepSize) -> Case:
    import timm

    with seeded():
        base: Any = timm.create_model(sizes.vit, num_classes=10)
    stream = generator(0, "perf", "vit")
    side = base.patch_embed.img_size[0]
    images = torch.randn(sizes.images, 3, side, side, generator=stream)
    labels = torch.randint(0, 10, (sizes.images,), generator=stream)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), labels)

    title = f"training step, {sizes.vit}, {sizes.images} images, adapters on the MLPs"
    models = variants_of(base, VIT.mlp, VIT_MLP, NAMES)
    return _step_case("bounded_step_vit_mlp", title, models, loss, "pos_embed")


def _gpt_neo_step(sizes: StepSize, name: str, targets: tuple[tuple[str, ...], str]) -> Case:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        hidden_size=sizes.width,
        num_layers=sizes.depth,
        num_heads=sizes.heads,
        vocab_size=sizes.vocabulary,
        attention_types=[[["global", "local"], sizes.depth // 2]],
        max_position_embeddings=sizes.length,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with seeded():
        base = GPTNeoForCausalLM(config)
    stream = generator(0, "perf", "gpt_neo")
    words = torch.randint(0, sizes.vocabulary, (sizes.texts, sizes.length), generator=stream)

    def loss(model: nn.Module) -> Tensor:
        return cast(Tensor, model(input_ids=words, labels=words).loss)

    where = "the MLPs" if name == "mlp" else "all linear layers"
    title = (
        f"training step, GPT-Neo, width {sizes.width}, {sizes.depth} layers, {sizes.texts} x"
        f" {sizes.length} tokens, adapters on {where}"
    )
    models = variants_of(base, *targets, NAMES)
    return _step_case(f"bounded_step_gpt_neo_{name}", title, models, loss, "transformer.wpe.weight")


def _step_case(
    name: str, title: str, models: dict[str, nn.Module], loss: Callable[..., Tensor], anchor: str
) -> Case:
    with torch.no_grad():
        values = {key: loss(model) for key, model in models.items()}
    checks = [
        Check(f"{key} = naive (loss, rel.)", relative_difference(values[key], values[NAIVE]), 1e-5)
        for key in (OURS_SINE, MERGED)
    ]
    variants = step_variants(models, loss, anchor)
    return Case(name, title, variants, PAIRS, checks, unit="step", goals=STEP_GOALS)


# Layers ------------------------------------------------------------------------------------------


def _layer(shape: Shape, tokens: int) -> Iterator[Case]:
    """Forward and backward of one layer whose input requires a gradient, and forward alone."""
    models = variants_of(linear(shape.d, shape.k), ("0",), "0", NAMES)
    stream = generator(0, "perf", shape.name)
    x = torch.randn(tokens, shape.d, generator=stream).requires_grad_()
    upstream = torch.randn(tokens, shape.k, generator=stream)
    variants = layer_variants(models, x, upstream)
    what = f"one layer, {shape.d} -> {shape.k}, {tokens} tokens, r = {SINE.rank}"
    name = f"bounded_{shape.name}_{tokens}"
    checks = _same_gradients(models, x, upstream)
    yield Case(name, f"{what}: fwd + bwd", variants, PAIRS, checks, "call", share=0.6, steady=True)
    if tokens >= FORWARD_TOKENS:
        yield _forward_case(f"{name}_forward", what, models, x)


def _forward_case(name: str, what: str, models: dict[str, nn.Module], x: Tensor) -> Case:
    chosen = (OURS_SINE, NAIVE, PEFT)
    with torch.no_grad():
        difference = relative_difference(models[OURS_SINE](x), models[NAIVE](x))
    return Case(
        name,
        f"{what}: forward, graph recorded",
        [Variant(key, partial(models[key], x)) for key in chosen],
        PAIRS[:2],
        [Check(f"{OURS_SINE} = naive (y, rel.)", difference, 1e-5)],
        "call",
        share=0.3,
        goals=FORWARD_GOALS,
        steady=True,
    )


def _same_gradients(models: dict[str, nn.Module], x: Tensor, upstream: Tensor) -> list[Check]:
    """Outputs and gradients of ours and of merged against those of naive."""
    results = {}
    for name in (OURS_SINE, NAIVE, MERGED):
        model = models[name]
        factors = [model.get_parameter(f"0.{key}") for key in ("A", "Bt")]
        y = model(x)
        results[name] = [y, *torch.autograd.grad(y, [x, *factors], upstream)]
    return [
        Check(
            f"{name} = naive (y, dx, dA, dB; rel.)",
            max(map(relative_difference, results[name], results[NAIVE])),
            1e-5,
        )
        for name in (OURS_SINE, MERGED)
    ]
