"""The bounded layer on a device: against float64, and timed beside its peers, with memory.

The floor is a layer of three products per token, forward, input and weight, with nothing else: no
exact bounded layer can be faster.  bfloat16 runs under autocast with factors in float32, ours and
PEFT's alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, cast
from unittest import mock

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recording
from torch.utils.benchmark.utils.timer import timer
from transformers import AutoConfig, AutoModelForCausalLM

from stable_forgetting.common.base.errors import one_line
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded import eager
from stable_forgetting.common.bounded import product as bounded_product
from stable_forgetting.common.bounded.layer import BoundedLinear
from stable_forgetting.common.bounded.phi import PHIS, Bound
from stable_forgetting.common.bounded.product import bounded_linear
from stable_forgetting.language.models.families import PUBLISHED, tiny_family
from tools.gpu.items import Job, Row
from tools.perf.layers import (
    FROZEN,
    GPT_MLP,
    MERGED,
    ONE,
    OURS_SINE,
    PEFT,
    VIT_MLP,
    Targets,
    layer_runs,
    linear,
    variants_of,
    with_layers,
)
from tools.perf.timing import Run, adamw_step, apart, interleaved, peak_mb

EAGER, COMPILED, FLOOR = "eager path", "merged, compiled", "three products"
OURS_COMPILED = "ours, compiled"
GOAL = 1.15
"""Of PEFT's time: a full step in bfloat16 with adapters on the MLPs at 4,096 tokens."""
TOKENS = 4096
RANK = 8
"""Of the profile, and of the rows in which a way is compiled."""
LAYER_SECONDS, STEP_SECONDS = 0.1, 0.3
"""Of timing one way; a layer takes .02 to 3 ms, a step 10 to 60."""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMITS = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""Of relative Frobenius errors: the products' rounding, whose sums are float32."""
KINK = 1e-5
"""Arguments this near to a kink of phi may round to its other side."""
LAYERS = {
    "ViT-S fc1": (1536, 384),
    "ViT-B fc1": (3072, 768),
    "ViT-B fc2": (768, 3072),
    "GPT-Neo-1.3B c_fc": (8192, 2048),
    "LLaMA-7B up_proj": (11008, 4096),
    "LLaMA-7B down_proj": (4096, 11008),
}
"""Layer -> (k, d)."""
LLAMA_MLP: Targets = (("*.mlp.*_proj",), r".*\.mlp\.(gate|up|down)_proj")


# Right? ------------------------------------------------------------------------------------------


def kernels(job: Job) -> Iterator[Row]:
    """One row per phi, rank and type, float32 products without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = (20, 12, 9) if job.tiny else (1000, 520, 777)  # (k, d, tokens): no multiples of a tile
    for phi, rank, (name, dtype) in product(PHIS, (4, 8, 16, 32), TYPES.items()):
        bound = Bound(phi, amplitude=0.7, frequency=1.3, clip=0.6)
        draws = _off_kinks(_operands(shape, rank, dtype), bound)
        wanted = _results({key: value.double() for key, value in draws.items()}, bound)
        placed = {key: value.to(job.device) for key, value in draws.items()}
        path = bounded_product._kernels(placed["A"], dtype).__name__.rpartition(".")[2]
        made, again = _results(placed, bound), _results(placed, bound)
        far = {key: apart(made[key].cpu(), wanted[key]) for key in wanted}
        same = all(torch.equal(made[key], again[key]) for key in made)
        ok = same and max(far.values()) <= LIMITS[name]
        row = {"phi": phi, "rank": rank, "type": name, "path": path, **far, "same bits": same}
        yield {**row, "limit": LIMITS[name], "ok": ok}


def _operands(shape: tuple[int, int, int], rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Operands in ``dtype``, factors in float32, as in a training in mixed precision."""
    k, d, tokens = shape
    draw = partial(torch.randn, generator=generator(0, "gpu", "kernels", rank))
    operands = {"x": draw(tokens, d), "weight": draw(k, d), "g": draw(tokens, k)}
    factors = {"A": 2 * draw(k, rank) / rank**0.5, "Bt": draw(rank, d)}
    return {**{key: value.to(dtype) for key, value in operands.items()}, **factors}


def _off_kinks(draws: dict[str, Tensor], bound: Bound) -> dict[str, Tensor]:
    """Without input features that meet an argument at a kink of phi: rounding picks its slope.

    One such argument of 520,000 (2.6e-7, relu, rank 32) changes dA by 3.2e-4.
    """
    z = (bound.frequency * draws["A"].double() @ draws["Bt"].double()).abs()
    kinks = {"relu": 0.0, "clip": bound.clip}
    if bound.phi in kinks:
        near = ((z - kinks[bound.phi]).abs() < KINK).any(0)
        draws["x"][:, near] = 0
    return draws


def _results(given: dict[str, Tensor], bound: Bound) -> dict[str, Tensor]:
    """Output and gradients by way of autograd."""
    names = ("x", "A", "Bt")
    leaves: dict[str, Any] = {key: given[key].detach().requires_grad_() for key in names}
    y = bounded_linear(leaves["x"], given["weight"], None, leaves["A"], leaves["Bt"], bound)
    gradients = torch.autograd.grad(y, list(leaves.values()), given["g"])
    return {"y": y.detach(), **{f"d{key}": g for key, g in zip(names, gradients, strict=True)}}


# Ways to compute a layer -------------------------------------------------------------------------


class _Three(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        _ = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad @ weight, None, None


class ThreeProducts(nn.Module):
    """A frozen layer whose backward pass forms the weight's gradient and drops it."""

    def __init__(self, layer: BoundedLinear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k)."""
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _Three.apply(x.to(self.weight.dtype), self.weight, self.bias)
            return out


def ways_of(
    base: nn.Module, targets: Targets, rank: int, compiled: str = ""
) -> dict[str, nn.Module]:
    """Name -> model; the eager path shares the model of ours.

    Args:
        compiled: Backend of ``torch.compile``; with it ours (also compiled), PEFT and the eager
            merged layer compiled.
    """
    models = variants_of(base, targets, (OURS_SINE, MERGED, PEFT, FROZEN), rank)
    for name, parameter in models[PEFT].named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    merged = models.pop(MERGED)
    if compiled:
        torch._dynamo.reset()
        models[COMPILED] = cast(nn.Module, torch.compile(merged, backend=compiled))
        ours = torch.compile(models[OURS_SINE], backend=compiled)
        models[OURS_COMPILED] = cast(nn.Module, ours)
        return models
    models[EAGER] = models[OURS_SINE]
    models[FLOOR] = with_layers(models[OURS_SINE], ThreeProducts)
    return models


def _within(name: str, device: str, kind: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` under autocast where the type is bfloat16, the eager path without our kernels."""

    def bound() -> Any:
        with contextlib.ExitStack() as stack:
            if kind == "bfloat16":
                stack.enter_context(torch.autocast(torch.device(device).type, torch.bfloat16))
            if name == EAGER:
                plain = mock.patch.object(bounded_product, "_kernels", lambda A, dtype: eager)
                stack.enter_context(plain)
            return run()

    return bound


def _numbers(runs: Mapping[str, Run], job: Job, seconds: float) -> dict[str, float]:
    """Median milliseconds of every way, what ours takes of its peers', and memory."""
    times = interleaved(runs, 0 if job.tiny else seconds * len(runs), 2, timer)
    medians = {name: 1e3 * float(np.median(values)) for name, values in times.items()}
    peers = [name for name in (PEFT, FLOOR, COMPILED) if name in medians]
    ratios = {f"{OURS_SINE} / {peer}": medians[OURS_SINE] / medians[peer] for peer in peers}
    if OURS_COMPILED in medians:
        ratios[f"{OURS_COMPILED} / {COMPILED}"] = medians[OURS_COMPILED] / medians[COMPILED]
    memory = {f"{name} MB": peak_mb(runs[name], job.device) for name in (OURS_SINE, PEFT, FROZEN)}
    return {**{f"{name} ms": value for name, value in medians.items()}, **ratios, **memory}


def _guarded(row: dict[str, Any], work: Callable[[], Row]) -> Row:
    """The row with its numbers, or with what the device says: the next row may still fit."""
    try:
        return {**row, **work()}
    except RuntimeError as error:
        return {**row, "says": one_line(error), "ok": False}
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _plain(job: Job, ranks: Sequence[int]) -> list[tuple[str, int, str]]:
    """(type, rank, no backend), the goal's case first."""
    plain = [("bfloat16", RANK, ""), ("float32", RANK, "")]
    return plain + [("bfloat16", rank, "") for rank in (() if job.tiny else ranks)]


def _compiled(job: Job) -> tuple[str, int, str]:
    """The type, the rank and the backend that compiles."""
    return "bfloat16", RANK, "eager" if job.tiny else "inductor"


def layers(job: Job) -> Iterator[Row]:
    """Forward and backward of one layer whose input requires a gradient."""
    shapes = {"tiny": (24, 16)} if job.tiny else LAYERS
    cases = [*_plain(job, (4, 16, 32)), _compiled(job)]  # compilation takes longest
    for (kind, rank, backend), name in product(cases, shapes):
        k, d = shapes[name]
        row = {"layer": name, "k": k, "d": d, "rank": rank, "type": kind}
        row["W_eff MB"] = k * d * TYPES[kind].itemsize / 1e6
        yield _guarded(row, partial(_layer, job, kind, rank, k, d, backend))


def _layer(job: Job, kind: str, rank: int, k: int, d: int, backend: str) -> Row:
    ways = ways_of(linear(d, k).to(job.device, TYPES[kind]), ONE, rank, backend)
    count, stream = 12 if job.tiny else TOKENS, generator(0, "gpu", "layers")
    x = torch.randn(count, d, generator=stream).to(job.device, TYPES[kind]).requires_grad_()
    upstream = torch.randn(count, k, generator=stream).to(job.device, TYPES[kind])
    plain = layer_runs(ways, x, upstream)
    runs = {name: _within(name, job.device, kind, run) for name, run in plain.items()}
    return {"tokens": count, **_numbers(runs, job, LAYER_SECONDS)}


# Full steps --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Body:
    """A model of a published shape with random weights and few blocks, and a batch for it.

    Attributes:
        build: (device, type of weights) -> model.
        loss: Device -> (model -> loss) on a fixed batch.
        targets: Of the MLPs.
        anchor: A parameter before the first block, which every way trains.
        tokens: Of a batch.
    """

    name: str
    build: Callable[[str, torch.dtype], nn.Module]
    loss: Callable[[str], Callable[[nn.Module], Tensor]]
    targets: Targets
    anchor: str
    tokens: int


def bodies(tiny: bool) -> list[Body]:
    """ViT-S/16, ViT-B/16, GPT-Neo-1.3B with 4 of 24 blocks, LLaMA-2-7B with 2 of 32."""
    first = "model.layers.0.input_layernorm.weight"
    if tiny:
        llama = _causal("tiny LLaMA", "llama", tiny_fields(2), LLAMA_MLP, first, (2, 8))
        return [_vit("tiny ViT", "test_vit", 1, 101), llama]
    neo: dict[str, Any] = {**PUBLISHED["gpt-neo-1.3b"][1], "num_layers": 4}
    neo |= {"attention_types": [[["global", "local"], 2]]}
    neo |= {f"{part}_dropout": 0.0 for part in ("resid", "embed", "attention")}
    llama_fields = {**PUBLISHED["llama-2-7b"][1], "num_hidden_layers": 2}
    batch = (8, 512)
    return [
        _vit("ViT-S/16", "vit_small_patch16_224", 21, 197),
        _vit("ViT-B/16", "vit_base_patch16_224", 21, 197),
        _causal("GPT-Neo-1.3B, 4 blocks", "gpt_neo", neo, GPT_MLP, "transformer.wpe.weight", batch),
        _causal("LLaMA-2-7B, 2 blocks", "llama", llama_fields, LLAMA_MLP, first, batch),
    ]


def tiny_fields(blocks: int) -> dict[str, Any]:
    """Of a LLaMA that a CPU runs in no time."""
    shape = tiny_family("llama").tiny
    assert shape is not None
    return {**shape(16, blocks, 2), "vocab_size": 40}


def _vit(name: str, architecture: str, images: int, each: int) -> Body:
    def build(device: str, dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            return cast(nn.Module, timm.create_model(architecture, num_classes=10)).to(dtype)

    def loss(device: str) -> Callable[[nn.Module], Tensor]:
        stream = generator(0, "gpu", "images")
        side = 160 if architecture == "test_vit" else 224
        x = torch.randn(images, 3, side, side, generator=stream).to(device)
        labels = torch.randint(0, 10, (images,), generator=stream).to(device)
        return lambda model: F.cross_entropy(model(x.to(next(model.parameters()).dtype)), labels)

    return Body(name, build, loss, VIT_MLP, "pos_embed", images * each)


def _causal(
    name: str,
    kind: str,
    fields: dict[str, Any],
    targets: Targets,
    anchor: str,
    batch: tuple[int, int],
) -> Body:
    def loss(device: str) -> Callable[[nn.Module], Tensor]:
        entries = fields.get("vocab_size", 50257)
        words = torch.randint(0, entries, batch, generator=generator(0, "gpu", "words")).to(device)
        return lambda model: cast(Tensor, model(input_ids=words, labels=words).loss)

    build = partial(random_causal, kind, fields)
    return Body(name, build, loss, targets, anchor, batch[0] * batch[1])


def random_causal(kind: str, fields: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """A causal model of transformers, drawn where it will lie."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **{**fields, **ends, "use_cache": False})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def step_runs(job: Job, body: Body, rank: int, kind: str, backend: str = "") -> dict[str, Run]:
    """Name -> one training step; optimizer states exist."""
    base, loss = body.build(job.device, TYPES[kind]), body.loss(job.device)
    runs: dict[str, Run] = {}
    for name, model in ways_of(base, body.targets, rank, backend).items():
        plain: nn.Module = getattr(model, "_orig_mod", model)
        plain.get_parameter(body.anchor).requires_grad_(True)
        runs[name] = adamw_step(model, _within(name, job.device, kind, partial(loss, model)))
        runs[name]()
    return runs


def steps(job: Job) -> Iterator[Row]:
    """Forward, backward and AdamW with adapters on the MLPs; the goal is that of bfloat16."""
    yield from _steps(job, _plain(job, (4, 32)))


def compiled(job: Job) -> Iterator[Row]:
    """The same steps under ``torch.compile``: ours, and the eager merged layer."""
    yield from _steps(job, [_compiled(job)])


def _steps(job: Job, cases: Sequence[tuple[str, int, str]]) -> Iterator[Row]:
    for (kind, rank, backend), body in product(cases, bodies(job.tiny)):
        row = {"model": body.name, "tokens": body.tokens, "rank": rank, "type": kind}
        yield _guarded(row, partial(_step, job, body, rank, kind, backend))


def _step(job: Job, body: Body, rank: int, kind: str, backend: str) -> Row:
    values = _numbers(step_runs(job, body, rank, kind, backend), job, STEP_SECONDS)
    if kind != "bfloat16" or backend:
        return values
    return {**values, "goal": f"at most {GOAL}", "met": values[f"{OURS_SINE} / {PEFT}"] <= GOAL}


def profile(job: Job) -> Iterator[Row]:
    """The longest kernels (on a CPU: operators) of one step, by their own time."""
    on_gpu = torch.device(job.device).type == "cuda"
    asked = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    runs = step_runs(job, bodies(job.tiny)[-1], RANK, "bfloat16")
    for name in (OURS_SINE, PEFT, FLOOR):
        with recording(activities=asked) as recorded:
            for _ in range(3):
                runs[name]()
            timer()  # waits for the GPU
        events = [
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
            for event in recorded.key_averages()
            if not on_gpu or event.device_type == DeviceType.CUDA  # an operator counts its kernels
        ]
        whole = sum(spent for spent, _ in events)
        for spent, event in sorted(events, key=lambda pair: -pair[0])[:12]:
            times = {"ms per step": spent / 3e3, "share": spent / whole, "calls": event.count / 3}
            yield {"way": name, "kernel": event.key[:80], **times}
