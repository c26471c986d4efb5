"""What every command that runs stages shares: workers, a live display, and how it ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import typer

from stable_forgetting.benchmarks.cli.options import console, print_error
from stable_forgetting.benchmarks.cli.progress import Display
from stable_forgetting.benchmarks.pipeline import executors
from stable_forgetting.common.base.registry import plugin_files
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

Watching = Callable[[str], Display]
"""Title -> the display around the running of a plan."""


@contextmanager
def working(runtime: Runtime, workers: int) -> Iterator[tuple[Executor, Watching]]:
    """One executor for all that a command runs; an interruption stops its workers."""
    count, store = workers or default_workers(runtime.device), StageStore(runtime.store)
    cards = executors.cards_of(runtime.device)
    with executors.executing(count, runtime.threads, plugin_files(), cards) as executor:
        yield executor, lambda title: Display(console, title, store, count)


def default_workers(device: str) -> int:
    """One per card; without one per core, at most eight."""
    cards = len(executors.cards_of(device))
    if cards or device.startswith("cuda"):
        return max(1, cards)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(cores, 8))


def finish(failed: dict[str, str]) -> None:
    """Prints what failed; exit code 1 if anything did."""
    for text in failed.values():
        print_error(f"failed: {text}")
    if failed:
        raise typer.Exit(1)
