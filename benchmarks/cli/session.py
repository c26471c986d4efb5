"""What every command that runs stages shares: workers, a live display, and how it ends."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from contextlib import AbstractContextManager

import typer

from stable_forgetting.benchmarks.cli.options import Pool, console, print_error
from stable_forgetting.benchmarks.cli.progress import Display
from stable_forgetting.benchmarks.pipeline import executors
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import plugin_files
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore


def executing(runtime: Runtime, pool: Pool) -> AbstractContextManager[Executor]:
    """One executor for all that a command runs; an interruption stops its workers."""
    if pool.executor:
        raise ConfigError(
            f"--executor {pool.executor}: this option is gone; --workers 1 works in this process, "
            "--workers N in N processes, and machines that share a --store divide the stages"
        )
    workers, cards = _workers(runtime, pool), executors.cards_of(runtime.device)
    return executors.executing(workers, runtime.threads, plugin_files(), cards)


def watching(title: str, runtime: Runtime, pool: Pool) -> Display:
    """The display around the running of a plan."""
    return Display(console, title, StageStore(runtime.store), _workers(runtime, pool))


def _workers(runtime: Runtime, pool: Pool) -> int:
    return pool.workers or default_workers(runtime.device)


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
