"""The command ``map``: run a stability map, or show what there is of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import Machine, Pool, Selection, console
from stable_forgetting.benchmarks.cli.session import executing, finish, run_with_audits, watching
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.common.base import processes
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.maps.resolve import ResolvedMap
    from stable_forgetting.common.protocol.benchmark import Runtime


@command(
    "unlearn map digits-class",
    "unlearn map digits-class --plan",
    "unlearn map digits-class --only gd_ball,gd_lora --seeds 8,9",
    "unlearn map cifar10-small --data-root data --set map.lambdas=[0.3,3]",
    "unlearn map digits-class --report",
)
def map(
    name: Annotated[str, typer.Argument(help="Sweep (see: unlearn ls maps) or YAML file.")],
    machine: Machine,
    selection: Selection,
    pool: Pool,
    plan: Annotated[bool, typer.Option("--plan", help="Print the cost; run nothing.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Show what is in the store; run nothing.")
    ] = False,
) -> None:
    """Sweep learning rate x lambda x steps, and judge each setting beside Retrain."""
    from stable_forgetting.benchmarks.audits.report import audit_tables
    from stable_forgetting.benchmarks.audits.stored import stored_plan
    from stable_forgetting.benchmarks.cli.shipped import show_shipped
    from stable_forgetting.benchmarks.maps.board import make_board, probe_suite
    from stable_forgetting.benchmarks.maps.report import sections
    from stable_forgetting.benchmarks.maps.resolve import load_map
    from stable_forgetting.benchmarks.maps.write import write_map

    resolved = load_map(name, selection.set_ or (), seeds=selection.numbers, only=selection.rows)
    if plan:
        show(console, [_plan(resolved)])
        return
    runtime = machine.runtime()
    failed = {} if report else _run(resolved, runtime, pool)
    board = make_board(resolved, StageStore(runtime.store))
    suite = probe_suite(board)
    if suite.audits and not report and not failed:
        with executing(runtime, pool) as executor:
            failed = run_with_audits(suite, runtime, pool, executor)[1]
        store = StageStore(runtime.store)
        board.probes = audit_tables(suite, store, stored_plan(suite, store))
    if not board.lines and not failed:
        missing = f"no complete seed of {resolved.name} in {machine.store}; run: unlearn map {name}"
        show_shipped(resolved.name, missing, maps=True)
        return
    if not processes.is_main():
        return
    folder = write_map(board, runtime.store)
    show(console, sections(board))
    files = "map.html, map.svg, map.json, cells.jsonl"
    console.print(f"\n[bold]Map[/bold]  {escape(str(folder))}/MAP.md ({files})")
    finish(failed)


def _run(resolved: ResolvedMap, runtime: Runtime, pool: Pool) -> dict[str, str]:
    """Runs every block that is not in the store; returns what failed."""
    from stable_forgetting.benchmarks.maps.plan import planner_of
    from stable_forgetting.benchmarks.pipeline.schedule import run_suite

    planner = planner_of(resolved)
    watched = watching(resolved.name, runtime, pool)
    with executing(runtime, pool) as executor, watched as display:
        execution = run_suite(resolved.suite, runtime, executor, watcher=display, planner=planner)
    return execution.failed


def _plan(resolved: ResolvedMap) -> Section:
    """Runs, optimizer steps and samples per method, from counts."""
    from stable_forgetting.benchmarks.maps.plan import runs_together

    rows, seeds = [], len(resolved.spec.seeds)
    for row in resolved.rows:
        configs = [row.config(lr, lam) for lr in row.lrs for lam in row.lambdas]
        runs, steps = len(configs), len(configs) * max(row.steps)
        block = min(resolved.spec.map.block, runs) if runs_together(row.cls, configs[0]) else 1
        counts = [runs, runs * len(row.steps), steps, configs[0].batch_size, block, steps * seeds]
        rows.append([row.label, *[str(count) for count in counts]])
    heads = ["method", "runs/seed", "cells/seed", "steps/seed", "batch", "at once", "steps in all"]
    text = [
        f"And {seeds} Originals and {2 * seeds} Retrains, shared with {resolved.spec.suite} where "
        "seeds agree; columns that are added to find an edge come on top."
    ]
    if resolved.probe:
        text.append(
            f"Then the probe ({', '.join(resolved.probe)}) of {len(rows)} best cells and "
            f"2 Retrains on {seeds} seeds."
        )
    return Section(f"{resolved.name}: {seeds} seeds", tuple(text), table(heads, rows))
