"""The adapted layer, and training steps of models made of it, beside their peers.

Peers: the same layer frozen (the floor), LoRA of the peft library, the bounded layer written as in
its formula, ``W0 x + s phi(omega A B^T) x``, with two products (naive), and with one product on
``W0 + dW`` by autograd (merged).  In units of one k x d product per token, forward and backward
cost 2 (frozen), 2 (LoRA), 5 (naive) and 3 (ours, merged).
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.vision.models.family import VIT
from tools.perf.timing import (
    CLASSES,
    Case,
    Run,
    adamw_step,
    apart,
    mflop,
    peak_mb,
    saved_mb,
    seeded,
)

SINE = AdapterConfig(phi="sine", omega=100.0)
LORA = AdapterConfig()
OURS_SINE, OURS_LORA = "ours, sine", "ours, identity"
NAIVE, MERGED = "naive, sine", "merged, autograd"
PEFT, FROZEN = "PEFT LoRA", "frozen"
NAMES = (OURS_SINE, OURS_LORA, NAIVE, MERGED, PEFT, FROZEN)
PAIRS = (
    (OURS_SINE, NAIVE),
    (OURS_SINE, PEFT),
    (OURS_LORA, PEFT),
    (OURS_SINE, MERGED),
    (OURS_SINE, FROZEN),
    (PEFT, FROZEN),
)
STEP_GOALS = {(OURS_SINE, NAIVE): 0.75, (OURS_SINE, PEFT): 1.25}
FORWARD_GOALS = {(OURS_SINE, PEFT): 1.05}
FORWARD_TOKENS = 1576
"""Forward passes alone are measured, and have a goal, from here on (a batch of 8 images)."""
LAYERS = {
    "vit_s_fc1": (1536, 384, (512, 1576, 4096)),
    "vit_s_fc2": (384, 1536, (1576,)),
    "vit_b_fc1": (3072, 768, (512, 1576)),
    "vit_b_fc2": (768, 3072, (1576,)),
    "phi_1_5_fc1": (8192, 2048, (512, 1024)),
}
"""Name -> (k, d, token counts); a ViT-B's are GPT-Neo-125M's too."""
QUICK_LAYERS = {"quick_fc1": (96, 24, (8, FORWARD_TOKENS))}
Targets = tuple[tuple[str, ...], str]
"""Where adapters go, as our patterns and as PEFT's regular expression."""
VIT_MLP: Targets = (VIT.mlp, r"blocks\.\d+\.mlp\.fc[12]")
GPT_MLP: Targets = (("*.mlp.c_fc", "*.mlp.c_proj"), r".*\.mlp\.c_(fc|proj)")
GPT_ALL: Targets = (
    (*GPT_MLP[0], "*.attention.*_proj"),
    r".*\.(mlp\.c_(fc|proj)|attention\.(k|v|q|out)_proj)",
)
ONE: Targets = (("0",), "0")


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


def with_layers(model: nn.Module, kind: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy of the model with layers of ``kind`` in the place of ours."""
    copied = copy.deepcopy(model)
    for name, layer in list(adapted_layers(copied)):
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, kind(layer))
    return copied


def _adapted(base: nn.Module, patterns: Sequence[str], config: AdapterConfig) -> nn.Module:
    """Adapters whose A has entries of 1e-3: with A = 0 nothing differs."""
    model = copy.deepcopy(base)
    attach(model, patterns, config, generator(0, "perf", "factors"))
    for name, layer in adapted_layers(model):
        draw = torch.randn(layer.A.shape, generator=generator(0, "perf", name))
        layer.A.data.copy_(1e-3 * draw)
    return model


def _peft(base: nn.Module, regex: str, ours: nn.Module, rank: int) -> nn.Module:
    """peft's LoRA with the factors of ``ours`` (their B is our A, their A our Bt)."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise UserError("this benchmark compares with peft: pip install '.[dev]'") from None
    config = LoraConfig(r=rank, lora_alpha=int(LORA.alpha), lora_dropout=0.0, target_modules=regex)
    model: nn.Module = inject_adapter_in_model(config, copy.deepcopy(base))
    for name, layer in adapted_layers(ours):
        theirs: Any = model.get_submodule(name)
        theirs.lora_B["default"].weight.data.copy_(layer.A.data)
        theirs.lora_A["default"].weight.data.copy_(layer.Bt.data)
    return model


def variants_of(
    base: nn.Module, targets: Targets, names: Sequence[str] = NAMES, rank: int = SINE.rank
) -> dict[str, nn.Module]:
    """Name -> model, all on the weights of ``base``, which is not changed."""
    patterns, regex = targets
    frozen = copy.deepcopy(base).requires_grad_(False)
    models = {FROZEN: frozen}
    for name, preset in ((OURS_SINE, SINE), (OURS_LORA, LORA)):
        models[name] = _adapted(frozen, patterns, preset.model_copy(update={"rank": rank}))
    models[NAIVE] = with_layers(models[OURS_SINE], NaiveBounded)
    models[MERGED] = with_layers(models[OURS_SINE], MergedBounded)
    models[PEFT] = _peft(frozen, regex, models[OURS_LORA], rank)
    return {name: models[name] for name in names}


def linear(d: int, k: int) -> nn.Module:
    """One layer ``d -> k``, always of the same weights."""
    with seeded():
        return nn.Sequential(nn.Linear(d, k))


# One layer ---------------------------------------------------------------------------------------


def layer_runs(models: Mapping[str, nn.Module], x: Tensor, upstream: Tensor) -> dict[str, Run]:
    """Forward and backward of one layer; ``x`` requires a gradient, as inside a model."""

    def run(model: nn.Module) -> object:
        asked = [x, *(p for p in model.parameters() if p.requires_grad)]
        return torch.autograd.grad(model(x), asked, upstream)

    return {name: partial(run, model) for name, model in models.items()}


def _layer_cases(name: str, d: int, k: int, tokens: int, steady: str) -> Iterator[Case]:
    """Forward and backward of one layer ``d -> k``; with many tokens, its forward too."""
    models = variants_of(linear(d, k), ONE)
    stream = generator(0, "perf", name)
    x = torch.randn(tokens, d, generator=stream).requires_grad_()
    upstream = torch.randn(tokens, k, generator=stream)
    runs = layer_runs(models, x, upstream)
    counts = {}
    for key, model in models.items():
        saved = saved_mb(partial(model, x), [x, *model.parameters()])
        counts[key] = {"saved MB": saved, "peak MB": peak_mb(runs[key]), "MFLOP": mflop(runs[key])}
    title, checks = (
        f"one layer {d} -> {k}, {tokens} tokens, r = {SINE.rank}",
        _same_results(models, x),
    )
    both = f"{title}: forward and backward{steady}"
    yield Case(name, both, runs, PAIRS, checks, counts, "call")
    if tokens >= FORWARD_TOKENS:
        forward = {key: partial(models[key], x) for key in (OURS_SINE, NAIVE, PEFT)}
        recorded = f"{title}: forward, graph recorded{steady}"
        goals = FORWARD_GOALS
        yield Case(f"{name}_forward", recorded, forward, PAIRS[:2], checks, goals=goals)


def _same_results(models: Mapping[str, nn.Module], x: Tensor) -> dict[str, tuple[float, float]]:
    """Outputs and gradients of ours and of merged against those of naive, and LoRA's outputs."""
    results = {}
    for name in (OURS_SINE, NAIVE, MERGED):
        factors = [models[name].get_parameter(f"0.{key}") for key in ("A", "Bt")]
        y = models[name](x)
        results[name] = [y, *torch.autograd.grad(y, [x, *factors], torch.ones_like(y))]
    checks = {
        f"{name} = naive (y, dx, dA, dB; rel.)": max(map(apart, results[name], results[NAIVE]))
        for name in (OURS_SINE, MERGED)
    }
    checks["identity = PEFT (rel.)"] = apart(models[OURS_LORA](x), models[PEFT](x))
    return {name: (value, 1e-5) for name, value in checks.items()}


def bounded_layer(quick: bool) -> Iterator[Case]:
    """Full steps; then layers on an allocator that keeps large blocks, as a GPU's does."""
    yield from _model_steps(quick)
    steady = "" if quick or not steady_allocator() else "; steady allocator"
    for name, (k, d, many) in (QUICK_LAYERS if quick else LAYERS).items():
        for tokens in many:
            yield from _layer_cases(f"bounded_{name}_{tokens}", d, k, tokens, steady)


def steady_allocator() -> bool:
    """Asks glibc's malloc to keep large blocks, as allocators of accelerators do; False elsewhere.

    By default a buffer above 32 MB is mapped, and its pages are faulted in, anew in every call;
    below that it depends on what the process did before.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
    settings = ((m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_top_pad, 2**28))
    return all([mallopt(key, value) == 1 for key, value in settings])


# A training step ---------------------------------------------------------------------------------


def _step_case(
    name: str,
    title: str,
    models: Mapping[str, nn.Module],
    loss: Callable[[nn.Module], Tensor],
    anchor: str,
) -> Case:
    """Forward, backward and AdamW.

    The parameter ``anchor`` before the first block is trained in every variant, so that gradients
    reach that block in the frozen one too.
    """
    with torch.no_grad():
        values = {key: loss(model) for key, model in models.items()}
    checks = {
        f"{key} = {peer} (loss, rel.)": (apart(values[key], values[peer]), 1e-5)
        for key, peer in ((OURS_SINE, NAIVE), (MERGED, NAIVE), (OURS_LORA, PEFT))
    }
    runs, counts = {}, {}
    for key, model in models.items():
        model.get_parameter(anchor).requires_grad_(True)
        runs[key] = adamw_step(model, partial(loss, model))
        runs[key]()  # the optimizer's state is made in the first step
        saved = saved_mb(partial(loss, model), [*model.parameters(), *model.buffers()])
        counts[key] = {"saved MB": saved, "peak MB": peak_mb(runs[key]), "MFLOP": mflop(runs[key])}
    return Case(name, title, runs, PAIRS, checks, counts, "step", goals=STEP_GOALS)


def _model_steps(quick: bool) -> Iterator[Case]:
    architecture, images = ("test_vit", 2) if quick else ("vit_small_patch16_224", 4)
    with seeded():
        vit: Any = timm.create_model(architecture, num_classes=CLASSES)
    stream, side = generator(0, "perf", "vit"), vit.patch_embed.img_size[0]
    x = torch.randn(images, 3, side, side, generator=stream)
    labels = torch.randint(0, CLASSES, (images,), generator=stream)
    title = f"training step, {architecture}, {images} images, adapters on the MLPs"
    models = variants_of(vit, VIT_MLP)
    yield _step_case(
        "bounded_step_vit_mlp",
        title,
        models,
        lambda model: F.cross_entropy(model(x), labels),
        "pos_embed",
    )
    width, heads, entries, length = (24, 2, 32, 8) if quick else (768, 12, 4096, 512)
    stream = generator(0, "perf", "gpt_neo")
    words = torch.randint(0, entries, (2, length), generator=stream)

    def text_loss(model: nn.Module) -> Tensor:
        return cast(Tensor, model(input_ids=words, labels=words).loss)

    for name, where, targets in (
        ("mlp", "the MLPs", GPT_MLP),
        ("all", "all linear layers", GPT_ALL),
    ):
        title = f"training step, GPT-Neo, width {width}, 2 layers, 2 x {length} tokens, {where}"
        models = variants_of(gpt_neo(width, 2, heads, entries, length), targets)
        case = f"bounded_step_gpt_neo_{name}"
        yield _step_case(case, title, models, text_loss, "transformer.wpe.weight")


def gpt_neo(width: int, depth: int, heads: int, entries: int, length: int) -> nn.Module:
    """A GPT-Neo without dropout, always of the same weights."""
    config = GPTNeoConfig(
        hidden_size=width,
        num_layers=depth,
        num_heads=heads,
        vocab_size=entries,
        attention_types=[[["global", "local"], depth // 2]],
        max_position_embeddings=length,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with seeded():
        return GPTNeoForCausalLM(config)
