"""Layers and full steps with the bounded layer, timed beside their peers, and their memory.

The floor is a layer of three products per token, forward, input and weight, with nothing else: no
exact bounded layer can be faster.  bfloat16 runs under autocast with factors in float32, ours and
PEFT's alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.errors import one_line
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded import eager
from stable_forgetting.common.bounded import product as bounded_product
from stable_forgetting.common.bounded.layer import BoundedLinear
from tools.gpu.items import Job, Row
from tools.gpu.models import Body, bodies
from tools.perf.adapters import (
    FROZEN,
    MERGED,
    OURS_SINE,
    PEFT,
    linear,
    variants_of,
    written_out,
)
from tools.perf.counts import peak_bytes
from tools.perf.measure import (
    Case,
    Effort,
    Variant,
    adamw_step,
    finish,
    measure,
)

EAGER, COMPILED, FLOOR = "eager path", "merged, compiled", "three products"
GOAL = 1.15
"""Of PEFT's time: a full step in bfloat16 with adapters on the MLPs at 4,096 tokens."""
TOKENS = 4096
COMPILED_RANK = 8
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LAYERS = {
    "ViT-S fc1": (1536, 384),
    "ViT-B fc1": (3072, 768),
    "ViT-B fc2": (768, 3072),
    "GPT-Neo-1.3B c_fc": (8192, 2048),
    "LLaMA-7B up_proj": (11008, 4096),
    "LLaMA-7B down_proj": (4096, 11008),
}
"""Layer -> (k, d)."""
TINY_LAYERS = {"tiny": (24, 16)}
Way = tuple[nn.Module, Callable[[], contextlib.AbstractContextManager[Any]]]


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


@dataclass(frozen=True)
class Setting:
    """What one row is about."""

    rank: int
    type: str

    @property
    def dtype(self) -> torch.dtype:
        """Of the frozen weights."""
        return DTYPES[self.type]


def ways_of(
    base: nn.Module, targets: tuple[tuple[str, ...], str], setting: Setting, tiny: bool
) -> dict[str, Way]:
    """Name -> (model, context it runs in); the eager path shares the model of ours."""
    models = variants_of(base, *targets, (OURS_SINE, MERGED, PEFT, FROZEN), setting.rank)
    for name, parameter in models[PEFT].named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    device = next(base.parameters()).device.type
    cast = partial(torch.autocast, device, torch.bfloat16, enabled=setting.type == "bfloat16")

    @contextlib.contextmanager
    def eagerly() -> Iterator[None]:
        with cast(), mock.patch.object(bounded_product, "_kernels", lambda A, dtype: eager):
            yield

    merged = models.pop(MERGED)
    ways: dict[str, Way] = {name: (model, cast) for name, model in models.items()}
    ways[EAGER] = (models[OURS_SINE], eagerly)
    ways[FLOOR] = (written_out(models[OURS_SINE], ThreeProducts), cast)
    if setting.rank == COMPILED_RANK:
        torch._dynamo.reset()
        compiled: Any = torch.compile(merged, backend="eager" if tiny else "inductor")
        ways[COMPILED] = (compiled, cast)
    return ways


def timed(runs: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Name -> median milliseconds, and the two ratios that matter."""
    variants = [Variant(name, run) for name, run in runs.items()]
    pairs = [(OURS_SINE, PEFT), (OURS_SINE, FLOOR)]
    result = measure(Case("case", "case", variants, pairs), Effort(seconds * len(runs), 2))
    times = {f"{row['name']} ms": row["wall"]["median"] for row in result["variants"]}
    ratios = {f"{p['ours']} / {p['peer']}": p["wall"]["median"] for p in result["pairs"]}
    return {**times, **ratios}


def peak_mb(run: Callable[[], object], device: str) -> float:
    """The most that one run holds beyond what was there, in MB."""
    if torch.device(device).type != "cuda":
        return peak_bytes(run) / 1e6
    finish()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    finish()
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def _memory(runs: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    return {f"{name} MB": peak_mb(runs[name], device) for name in (OURS_SINE, PEFT, FROZEN)}


def layers(job: Job) -> Iterator[Row]:
    """Forward and backward of one layer whose input requires a gradient."""
    shapes = TINY_LAYERS if job.tiny else LAYERS
    for name, kind, rank in product(shapes, DTYPES, (8,) if job.tiny else (8, 4, 16, 32)):
        setting, (k, d) = Setting(rank, kind), shapes[name]
        row = {"layer": name, "k": k, "d": d, "rank": rank, "type": kind}
        row["W_eff MB"] = k * d * setting.dtype.itemsize / 1e6
        yield _guarded(row, partial(_layer, job, setting, k, d))


def _layer(job: Job, setting: Setting, k: int, d: int) -> Row:
    base = linear(d, k).to(job.device, setting.dtype)
    ways = ways_of(base, (("0",), "0"), setting, job.tiny)
    stream = generator(0, "gpu", "layers")
    count = 12 if job.tiny else TOKENS
    x = torch.randn(count, d, generator=stream).to(job.device, setting.dtype).requires_grad_()
    upstream = torch.randn(count, k, generator=stream).to(job.device, setting.dtype)

    def call(model: nn.Module, context: Callable[[], Any]) -> None:
        asked = [x, *(p for p in model.parameters() if p.requires_grad)]
        with context():
            torch.autograd.grad(model(x), asked, upstream)

    runs = {name: partial(call, *way) for name, way in ways.items()}
    return {"tokens": count, **timed(runs, 0 if job.tiny else 0.8), **_memory(runs, job.device)}


def steps(job: Job) -> Iterator[Row]:
    """Forward, backward and AdamW with adapters on the MLPs; the goal is that of bfloat16."""
    cases = [(8, "bfloat16"), (8, "float32"), (4, "bfloat16"), (32, "bfloat16")]
    for rank, kind in cases[: 2 if job.tiny else None]:
        for body in bodies(job.tiny):
            setting = Setting(rank, kind)
            row = {"model": body.name, "tokens": body.tokens, "rank": rank, "type": kind}
            yield _guarded(row, partial(_step, job, body, setting))


def step_runs(job: Job, body: Body, setting: Setting) -> dict[str, Callable[[], None]]:
    """Name -> one training step; optimizer states exist."""
    base = body.build(job.device, setting.dtype)
    loss = body.loss(job.device)
    runs = {}
    for name, (model, context) in ways_of(base, body.targets, setting, job.tiny).items():
        getattr(model, "_orig_mod", model).get_parameter(body.anchor).requires_grad_(True)

        def value(model: nn.Module = model, context: Callable[[], Any] = context) -> Tensor:
            with context():
                return loss(model)

        runs[name] = adamw_step(model, value)
        runs[name]()
    return runs


def _step(job: Job, body: Body, setting: Setting) -> Row:
    runs = step_runs(job, body, setting)
    values = timed(runs, 0 if job.tiny else 1.0)
    goal: dict[str, Any] = {}
    if setting.type == "bfloat16":
        ratio = values[f"{OURS_SINE} / {PEFT}"]
        goal = {"goal": f"at most {GOAL}", "met": ratio <= GOAL}
    return {**values, **_memory(runs, job.device), **goal}


def profile(job: Job) -> Iterator[Row]:
    """The longest kernels (on a CPU: operators) of one step, by their own time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    on_gpu = torch.device(job.device).type == "cuda"
    asked = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    runs = step_runs(job, bodies(job.tiny)[-1], Setting(COMPILED_RANK, "bfloat16"))
    for name in (OURS_SINE, PEFT, FLOOR):
        with recording(activities=asked) as recorded:
            for _ in range(3):
                runs[name]()
            finish()
        kernels = [
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
            for event in recorded.key_averages()
        ]
        whole = sum(spent for spent, _ in kernels)
        for spent, event in sorted(kernels, key=lambda pair: -pair[0])[:12]:
            times = {"ms per step": spent / 3e3, "share": spent / whole, "calls": event.count / 3}
            yield {"way": name, "kernel": event.key[:80], **times}


def _guarded(row: dict[str, Any], work: Callable[[], Row]) -> Row:
    """The row with its numbers, or with what the device says: the next row may still fit."""
    try:
        return {**row, **work()}
    except RuntimeError as error:
        return {**row, "says": one_line(error), "ok": False}
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
