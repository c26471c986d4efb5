"""``unlearn rehearse``."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.command import command
from benchmarks.cli.options import STORE, DataRoot, Device, Machine, Selection, Threads, console
from benchmarks.pipeline.executors import make_executor
from benchmarks.report.terminal import show
from benchmarks.spec.resolve import ResolvedSuite
from common.protocol.benchmark import Runtime


@command(
    "unlearn rehearse tofu-llama2-7b-forget10",
    "unlearn rehearse tdec-gpt-neo-1.3b --data-root data --only gd_sine,loku",
)
def rehearse(
    suite: Annotated[str, typer.Argument(help="Suite name, group of suites, or YAML file.")],
    selection: Selection,
    store: Annotated[
        Path | None, typer.Option(help="Keep the rehearsal below this folder; else it is deleted.")
    ] = None,
    data_root: DataRoot = None,
    device: Device = "cpu",
    threads: Threads = 1,
) -> None:
    """Run a suite end to end: small random models, few samples, first and last steps."""
    suites = selection.suites(suite, store or STORE)
    with tempfile.TemporaryDirectory(prefix="unlearn-rehearsal-") as folder:
        place = (store or Path(folder)) / "rehearsals"
        machine = Machine(place, data_root, device, threads, selection.plugin)
        failed = [each.name for each in suites if not _rehearse(each, machine.runtime())]
    if failed:
        raise typer.Exit(1)


def _rehearse(suite: ResolvedSuite, runtime: Runtime) -> bool:
    """Whether all went well; prints the table."""
    from benchmarks.rehearsal.report import section
    from benchmarks.rehearsal.suite import rehearsed
    from benchmarks.rehearsal.work import rehearse as rehearse_rows

    runtime = replace(runtime, store=runtime.store / suite.name)
    small, stand_in = rehearsed(suite, runtime, runtime.store)
    executor = make_executor("inline", 1, runtime.threads, runtime.plugins)
    rows = []
    for row in rehearse_rows(small, runtime, executor):
        rows.append(row)
        line = f"{suite.name}: {row.label}: {row.error or 'ok'} ({row.seconds:.1f} s)"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    show(console, [section(suite.name, rows, stand_in.notes)])
    return not any(row.error for row in rows)
