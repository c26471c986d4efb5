"""``unlearn run SUITE --rehearse``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import typer

from stable_forgetting.benchmarks.cli.options import Machine, Selection, console
from stable_forgetting.benchmarks.paper.rehearsals import full_suites, write_rehearsal
from stable_forgetting.benchmarks.pipeline.executors import make_executor
from stable_forgetting.benchmarks.rehearsal.suite import rehearsed
from stable_forgetting.benchmarks.rehearsal.work import failed, rehearse, section
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.benchmark import Runtime


def rehearse_suites(
    name: str, selection: Selection, machine: Machine, given: Collection[str], record: Path | None
) -> None:
    """Tries suites from end to end, on the CPU and in a folder that is deleted.

    Args:
        name: Suite, group of suites, or ``full``.
        selection: Seeds, rows and settings.
        machine: Where it runs.
        given: Options on the command line: a store among them is kept, a device is used.
        record: JSON file for the suites that succeeded.

    Raises:
        ConfigError: A part of a suite was to be recorded.
    """
    if record is not None and (selection.only or selection.set_ or selection.seeds):
        raise ConfigError("--record: a suite is rehearsed whole; leave --only, --set, --seeds out")
    names = full_suites() if name == "full" else [name]
    suites = [suite for each in names for suite in selection.suites(each, machine.store)]
    failed = False
    with tempfile.TemporaryDirectory(prefix="unlearn-rehearsal-") as folder:
        store = (machine.store if "store" in given else Path(folder)) / "rehearsals"
        device = machine.device if "device" in given else "cpu"
        machine = replace(machine, store=store, device=device)
        for suite in suites:
            started = time.process_time()
            good = _rehearse(suite, machine.runtime())
            failed |= not good
            if good and record is not None:
                write_rehearsal(record, suite, time.process_time() - started)
    if failed:
        raise typer.Exit(1)


def _rehearse(suite: ResolvedSuite, runtime: Runtime) -> bool:
    """Whether all went well; prints the table.  Suites share what is equal in them."""
    small, stand_in = rehearsed(suite, runtime, runtime.store / "stand-ins")
    executor = make_executor(1, runtime.threads, runtime.plugins)
    rows = []
    for row in rehearse(small, runtime, executor):
        rows.append(row)
        line = f"{suite.name}: {row['row']}: {row['']} ({row['s']} s)"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    show(console, [section(suite.name, rows, stand_in.notes)])
    return not any(map(failed, rows))
