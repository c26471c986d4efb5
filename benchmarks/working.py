"""What every command that runs stages shares: workers, a live display, and how it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from benchmarks.display import Display
from benchmarks.executors import abandon, make_executor
from benchmarks.options import console, tell

if TYPE_CHECKING:
    from common.benchmark import Runtime


@contextmanager
def working(
    title: str, runtime: Runtime, workers: int, executor: str
) -> Iterator[tuple[Executor, Display]]:
    """A pool and a display around the running of a plan; an interruption stops the workers.

    Args:
        title: What the display calls it.
        runtime: Device, threads and plugins of the workers.
        workers: How many; 0 takes what fits the device.
        executor: Its name, of :data:`benchmarks.executors.NAMES`.
    """
    count = workers or default_workers(runtime.device)
    pool = make_executor(executor, count, runtime.threads, runtime.plugins)
    try:
        with Display(console, title) as display:
            yield pool, display
    except BaseException:
        abandon(pool)
        raise
    pool.shutdown()


def default_workers(device: str) -> int:
    """One on an accelerator, else one per core, at most eight."""
    if device.startswith("cuda"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if device == "auto" and Path("/dev/nvidia0").exists():
        return 1
    return max(1, min(cores, 8))


def finish(failed: dict[str, str]) -> None:
    """Tells what failed; exit code 1 if anything did."""
    for text in failed.values():
        tell(f"failed: {text}")
    if failed:
        raise typer.Exit(1)
