"""Interleaved timing of variants of one job, and the counts that no machine changes.

Variants take turns (A B C, C B A, ...), so that whatever slows the machine down meets all of them;
what is read is the ratio of two variants, never a time alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

Size = Literal["full", "quick", "tiny"]
Clock = Literal["cpu", "wall"]
CLOCKS: tuple[Clock, ...] = ("cpu", "wall")
SAMPLE_SECONDS = 0.03
MAX_REPEATS = 1000


@dataclass(frozen=True)
class Variant:
    """One way to do the job.

    Attributes:
        run: Does the job once; running it again must cost the same.
        counts: Name -> deterministic count of one run.
    """

    name: str
    run: Callable[[], object]
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Something that must hold for the comparison to be fair: ``value <= limit``."""

    name: str
    value: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether it holds; never for NaN."""
        return self.value <= self.limit


@dataclass(frozen=True)
class Case:
    """Several ways to do one job.

    Attributes:
        variants: At least two, with different names.
        pairs: (ours, peer) names whose ratio is reported.
        per_run: Units in one run of a variant.
        share: Of the time that an effort gives to a case: less where runs are short.
        goals: Pair -> limit of its ratio; missing one is reported and nothing else.
        steady: Measured with :func:`steady_allocator`, where there is one.
    """

    name: str
    title: str
    variants: Sequence[Variant]
    pairs: Sequence[tuple[str, str]]
    checks: Sequence[Check] = ()
    unit: str = "run"
    per_run: int = 1
    share: float = 1.0
    goals: Mapping[tuple[str, str], float] = field(default_factory=dict)
    steady: bool = False

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        assert len(set(names)) == len(names) >= 2, f"{self.name}: two or more distinct variants"
        unknown = {name for pair in self.pairs for name in pair} - set(names)
        assert set(self.goals) <= set(self.pairs), f"{self.name}: goals of pairs not measured"
        assert not unknown, f"{self.name}: pairs of unknown variants {sorted(unknown)}"


@dataclass(frozen=True)
class Effort:
    """How long to measure a case: whole pairs of rounds until ``seconds`` are over."""

    seconds: float
    min_rounds: int = 4


# Timing ------------------------------------------------------------------------------------------


def measure(case: Case, effort: Effort) -> dict[str, Any]:
    """Times all variants of a case in turns, on one thread.

    Returns:
        JSON types: ``rounds``; per variant ``cpu`` and ``wall`` milliseconds per unit (``median``,
        ``min``, ``samples``) and counts; per pair the :func:`ratio` on both clocks; checks.
    """
    samples = _rounds(case.variants, case.share * effort.seconds, effort.min_rounds)
    scale = 1e3 / case.per_run
    times = {
        name: {clock: [scale * value for value in rows[clock]] for clock in CLOCKS}
        for name, rows in samples.items()
    }
    return {
        "name": case.name,
        "title": case.title,
        "unit": case.unit,
        "rounds": len(next(iter(times.values()))["cpu"]),
        "variants": [
            {
                "name": variant.name,
                **{clock: _summary(times[variant.name][clock]) for clock in CLOCKS},
                "counts": dict(variant.counts),
            }
            for variant in case.variants
        ],
        "pairs": [
            {
                "ours": ours,
                "peer": peer,
                **{clock: ratio(times[ours][clock], times[peer][clock]) for clock in CLOCKS},
                "goal": case.goals.get((ours, peer)),
            }
            for ours, peer in case.pairs
        ],
        "checks": [_as_json(check) for check in case.checks],
    }


def _rounds(
    variants: Sequence[Variant], seconds: float, least: int
) -> dict[str, dict[Clock, list[float]]]:
    """Seconds per run of every variant in every round; an even number of rounds."""
    samples: dict[str, dict[Clock, list[float]]] = {
        variant.name: {clock: [] for clock in CLOCKS} for variant in variants
    }
    with _alone():
        repeats = {variant.name: _repeats(variant) for variant in variants}
        end, done = time.perf_counter() + seconds, 0
        while done < least or done % 2 or time.perf_counter() < end:
            gc.collect()
            for variant in variants if done % 2 == 0 else reversed(variants):
                cpu, wall = _sample(variant.run, repeats[variant.name])
                samples[variant.name]["cpu"].append(cpu)
                samples[variant.name]["wall"].append(wall)
            done += 1
    return samples


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread inside the block: threads that wait for each other time the neighbours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Torch's global random stream from ``seed`` inside the block; put back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One thread, no garbage collection, and torch's global random stream put back."""
    collecting = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with one_thread(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()


def _repeats(variant: Variant) -> int:
    """Runs per sample, so that a sample is long against the clock's resolution; warms up too."""
    _, wall = _sample(variant.run, 1)
    if wall >= SAMPLE_SECONDS:
        return 1
    _, wall = _sample(variant.run, 1)
    return min(MAX_REPEATS, max(1, math.ceil(SAMPLE_SECONDS / max(wall, 1e-7))))


def _sample(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(CPU, wall) seconds per run; a GPU finishes what it was given."""
    finish()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        run()
    finish()
    return (time.process_time() - cpu) / repeats, (time.perf_counter() - wall) / repeats


def finish() -> None:
    """Waits for the GPU, where this process has one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": float(np.median(values)), "min": min(values), "samples": list(values)}


def ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """``ours / peer``: of medians, of minima, and the quartiles of the ratios round by round.

    A round's two samples were taken one after the other, so their ratio hardly sees slow drifts of
    the machine's speed; its quartiles say how far one such ratio can be trusted.
    """
    by_round = np.asarray(ours) / np.asarray(peer)
    low, high = np.quantile(by_round, [0.25, 0.75])
    return {
        "median": float(np.median(ours) / np.median(peer)),
        "min": min(ours) / min(peer),
        "low": float(low),
        "high": float(high),
    }


def _as_json(check: Check) -> dict[str, Any]:
    value = check.value if math.isfinite(check.value) else None
    return {"name": check.name, "value": value, "limit": check.limit, "ok": check.ok}


def steady_allocator() -> bool:
    """Asks glibc's malloc to keep large blocks, as allocators of accelerators do; False elsewhere.

    By default a buffer above 32 MB is mapped, and its pages are faulted in, anew in every call;
    below that it depends on what the process did before.  A user has that default, so it is what
    is measured; kernels are easier to tell apart without it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
    settings = ((m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_top_pad, 2**28))
    return all([mallopt(key, value) == 1 for key, value in settings])


def adamw_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Forward, backward and AdamW on what of ``model`` is trainable, as one call."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def run() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def relative_difference(first: Tensor, second: Tensor) -> float:
    """``||first - second|| / ||second||`` in float64."""
    first, second = first.detach().double(), second.detach().double()
    return float(torch.linalg.vector_norm(first - second) / torch.linalg.vector_norm(second))


# The small vision transformer that several benchmarks share ---------------------------------------


@dataclass(frozen=True)
class ViTSize:
    """A vision transformer from scratch and a batch for it; sides in px."""

    image: int = 32
    patch: int = 4
    channels: int = 3
    dim: int = 192
    depth: int = 4
    heads: int = 3
    classes: int = 10
    batch: int = 16

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1

    def __str__(self) -> str:
        return f"ViT dim {self.dim} depth {self.depth}, {self.tokens} tokens, batch {self.batch}"


DIGITS = ViTSize(image=16, patch=8, channels=1, dim=64, heads=4, batch=64)


def make_vit(size: ViTSize, seed: int = 0) -> nn.Module:
    """timm's transformer in train mode (without dropout); the same seed gives the same bits."""
    from timm.models.vision_transformer import VisionTransformer

    with seeded(seed):
        return VisionTransformer(
            img_size=size.image,
            patch_size=size.patch,
            in_chans=size.channels,
            num_classes=size.classes,
            embed_dim=size.dim,
            depth=size.depth,
            num_heads=size.heads,
        )
