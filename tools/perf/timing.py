"""Variants of one job timed in turns by ``torch.utils.benchmark``, and what they hold in memory.

Variants take turns (A B C, C B A, ...), so that whatever slows the machine down meets all of them.
What is read is the ratio of two variants, never a time alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import flop_registry

Run = Callable[[], object]
SAMPLE_SECONDS = 0.03


@dataclass(frozen=True)
class Case:
    """Several ways to do one job.

    Attributes:
        runs: Name of a variant -> does the job once.
        pairs: (ours, peer) names whose ratio is reported.
        checks: What must hold for the comparison to be fair: name -> (value, largest that passes).
        counts: Name of a variant -> counts of one run, the same on every machine.
        per_run: Units in one run.
        goals: Pair -> limit of its ratio; missing one is reported and nothing else.
        rounds: Fewest, at full sizes.
    """

    name: str
    title: str
    runs: Mapping[str, Run]
    pairs: Sequence[tuple[str, str]]
    checks: Mapping[str, tuple[float, float]]
    counts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unit: str = "run"
    per_run: int = 1
    goals: Mapping[tuple[str, str], float] = field(default_factory=dict)
    rounds: int = 4


def interleaved(
    runs: Mapping[str, Run],
    seconds: float,
    least: int = 4,
    timer: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds per run of every variant in every round, on one thread.

    Args:
        seconds: Rounds go on until they are over.
        least: Fewest rounds.
        timer: Seconds on the processor, which other work on the machine hardly changes.
    """
    timers = {n: Timer("run()", globals={"run": run}, timer=timer) for n, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.random.fork_rng(devices=[]):
        repeats = {n: t.blocked_autorange(min_run_time=SAMPLE_SECONDS) for n, t in timers.items()}
        end, done = time.perf_counter() + seconds, 0
        while done < least or time.perf_counter() < end:
            for name in runs if done % 2 == 0 else reversed([*runs]):
                number = repeats[name].number_per_run
                times[name].append(timers[name].timeit(number).mean)
            done += 1
    return times


def measure(case: Case, seconds: float, least: int = 4) -> dict[str, Any]:
    """Times a case; JSON types, milliseconds per unit, ratios of medians with their quartiles."""
    times = interleaved(case.runs, seconds, least)
    scale = 1e3 / case.per_run
    variants = {
        name: {
            "ms": scale * float(np.median(times[name])),
            "samples": [scale * value for value in times[name]],
            "counts": dict(case.counts.get(name, {})),
        }
        for name in case.runs
    }
    pairs = [
        {
            "ours": ours,
            "peer": peer,
            "goal": case.goals.get((ours, peer)),
            **ratio(times[ours], times[peer]),
        }
        for ours, peer in case.pairs
    ]
    checks = [
        {"name": name, "value": value if np.isfinite(value) else None, "limit": limit}
        | {"ok": bool(value <= limit)}
        for name, (value, limit) in case.checks.items()
    ]
    about = {"name": case.name, "title": case.title, "unit": case.unit}
    return about | {"variants": variants, "pairs": pairs, "checks": checks}


def ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """``ours / peer`` of medians, and the quartiles of the ratios round by round."""
    low, high = np.quantile(np.asarray(ours) / np.asarray(peer), [0.25, 0.75])
    median = float(np.median(ours) / np.median(peer))
    return {"median": median, "low": float(low), "high": float(high)}


# Counts ------------------------------------------------------------------------------------------


def peak_mb(run: Run, device: str = "cpu") -> float:
    """The most MB that one run holds at once beyond what was there."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every start and stop is printed
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    ledger = recorded.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in ledger if event.name() == "[memory]"]
    held = np.cumsum([size for _, size in sorted(changes, key=lambda change: change[0])])
    return max(int(held.max(initial=0)), 0) / 1e6


class _Flops(TorchDispatchMode):
    """Torch's own counter by modules cannot look into ``autograd.grad``, nor at ``addmm_``."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::").removesuffix("_")
        count = flop_registry.get(getattr(torch.ops.aten, name, None))
        self.total += 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        return out


def mflop(run: Run) -> float:
    """Millions of operations in matrix products, convolutions and attention of one run."""
    with _Flops() as counter:
        run()
    return counter.total / 1e6


# Shared by several benchmarks --------------------------------------------------------------------


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Torch's global random stream from ``seed`` inside the block; put back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def adamw_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Forward, backward and AdamW on what of ``model`` is trainable, as one call."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def run() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def apart(first: Tensor, second: Tensor) -> float:
    """``||first - second|| / ||second||`` in float64."""
    first, second = first.detach().double(), second.detach().double()
    return float(torch.linalg.vector_norm(first - second) / torch.linalg.vector_norm(second))


CLASSES = 10
