"""What every command that runs stages shares: workers, a live display, and how it ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stable_forgetting.benchmarks.cli.options import Pool, console, print_error
from stable_forgetting.benchmarks.cli.progress import Display
from stable_forgetting.benchmarks.pipeline.executors import WorkerPool, cards_of, make_executor
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.base.registry import plugin_files
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.common.protocol.benchmark import Runtime


@contextmanager
def executing(runtime: Runtime, pool: Pool) -> Iterator[Executor]:
    """One executor for all that a command runs; an interruption stops its workers."""
    workers, cards = _workers(runtime, pool), cards_of(runtime.device)
    executor = make_executor(pool.executor, workers, runtime.threads, plugin_files(), cards)
    try:
        yield executor
    except BaseException:
        if isinstance(executor, WorkerPool):
            executor.abandon()
        else:
            executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def watching(title: str, runtime: Runtime, pool: Pool) -> Display:
    """The display around the running of a plan."""
    return Display(console, title, StageStore(runtime.store), _workers(runtime, pool))


def _workers(runtime: Runtime, pool: Pool) -> int:
    return pool.workers or default_workers(runtime.device)


def run_with_audits(
    suite: ResolvedSuite, runtime: Runtime, pool: Pool, executor: Executor
) -> tuple[int, dict[str, str]]:
    """Runs what the store lacks of a suite and of its own audits.

    Returns:
        How many stages were run, and what failed.
    """
    from stable_forgetting.benchmarks.audits.plan import probe_plan
    from stable_forgetting.benchmarks.pipeline.schedule import run_plan, run_suite
    from stable_forgetting.benchmarks.suite.remembered import suite_files
    from stable_forgetting.common.protocol.benchmark import check_device

    if runtime.device not in ("auto", "cpu"):
        check_device(runtime.device)
    folder = runtime.store / "suites" / suite.name
    first, began = processes.is_main() and not folder.exists(), False
    try:
        with watching(suite.name, runtime, pool) as display:
            if processes.is_main():  # by its name the run can be reported, even if it is cut short
                write_files(folder, suite_files(suite))
            try:
                execution = run_suite(suite, runtime, executor, watcher=display)
            finally:
                began = bool(display.done)
            failed = {key: with_mends(suite, text) for key, text in execution.failed.items()}
            if not suite.audits:
                return execution.executed, failed
            plan = probe_plan(suite, StageStore(runtime.store))
            audits = run_plan(plan, runtime, executor, watcher=display)
    except UserError:
        if first and not began:
            _remove(folder, runtime.store)
        raise
    return execution.executed + audits.executed, failed | audits.failed


def with_mends(suite: ResolvedSuite, text: str) -> str:
    """What failed; where memory of a card ran out, with what would lower it, as a plan counts."""
    if "OutOfMemoryError" not in text:
        return text
    from stable_forgetting.benchmarks.costs.estimate import mends

    known = mends(suite, text.partition("/")[0])
    if not known:
        ways = "accumulation, protocol.model.gradient_checkpointing, an adapter, or FSDP"
        return f"{text}; less memory: {ways} (docs/scale.md)"
    held = known.pop("")
    ways = "; ".join(f"{size / 1e9:.0f} GB with {way}" for way, size in known.items())
    return f"{text}; it holds {held / 1e9:.0f} GB by unlearn plan; less: {ways}"


def _remove(folder: Path, store: Path) -> None:
    """Removes what a refused run wrote, and the folders that are empty then, the store too."""
    shutil.rmtree(folder, ignore_errors=True)
    StageStore(store).sweep()
    for empty in (store / "leases", *folder.parents[: len(folder.relative_to(store).parts)]):
        with suppress(OSError):
            empty.rmdir()


def default_workers(device: str) -> int:
    """One per card; without one per core, at most eight."""
    cards = len(cards_of(device))
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
