"""``unlearn rehearse``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    DataRoot,
    Device,
    Machine,
    Selection,
    Threads,
    console,
)
from stable_forgetting.benchmarks.pipeline.executors import make_executor
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.benchmark import Runtime


@command(
    "unlearn rehearse tofu-llama2-7b-forget10",
    "unlearn rehearse tdec-gpt-neo-1.3b --data-root data --only gd_sine,loku",
    "unlearn rehearse full --record rehearsals.json",
)
def rehearse(
    suite: Annotated[
        str,
        typer.Argument(help="Suite name, group of suites, YAML file, or full: all for a GPU."),
    ],
    selection: Selection,
    store: Annotated[
        Path | None,
        typer.Option(help="Keep the rehearsal in this folder; otherwise it is deleted."),
    ] = None,
    data_root: DataRoot = None,
    device: Device = "cpu",
    threads: Threads = 1,
    record: Annotated[
        Path | None, typer.Option(help="Write into this JSON file which suites succeeded.")
    ] = None,
) -> None:
    """Try a suite from end to end: small random models, few samples, first and last steps."""
    from stable_forgetting.benchmarks.paper.rehearsals import full_suites, write_rehearsal

    if record is not None and (selection.only or selection.set_ or selection.seeds):
        raise ConfigError("--record: a suite is rehearsed whole; leave --only, --set, --seeds out")
    names = full_suites() if suite == "full" else [suite]
    suites = [each for name in names for each in selection.suites(name, store or STORE)]
    failed = False
    with tempfile.TemporaryDirectory(prefix="unlearn-rehearsal-") as folder:
        place = (store or Path(folder)) / "rehearsals"
        machine = Machine(place, data_root, device, threads, selection.plugin)
        for each in suites:
            started = time.process_time()
            good = _rehearse(each, machine.runtime())
            failed |= not good
            if good and record is not None:
                write_rehearsal(record, each, time.process_time() - started)
    if failed:
        raise typer.Exit(1)


def _rehearse(suite: ResolvedSuite, runtime: Runtime) -> bool:
    """Whether all went well; prints the table.  Suites share what is equal in them."""
    from stable_forgetting.benchmarks.rehearsal.report import section
    from stable_forgetting.benchmarks.rehearsal.suite import rehearsed
    from stable_forgetting.benchmarks.rehearsal.work import rehearse as rehearse_rows

    small, stand_in = rehearsed(suite, runtime, runtime.store / "stand-ins")
    executor = make_executor(1, runtime.threads, runtime.plugins)
    rows = []
    for row in rehearse_rows(small, runtime, executor):
        rows.append(row)
        state = row.error or ("does not apply" if row.inapplicable else "ok")
        line = f"{suite.name}: {row.label}: {state} ({row.seconds:.1f} s)"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    show(console, [section(suite.name, rows, stand_in.notes)])
    return not any(row.error for row in rows)
