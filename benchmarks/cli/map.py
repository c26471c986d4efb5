"""``unlearn map``: run a stability map, or show what there is of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.options import (
    STORE,
    DataRoot,
    Device,
    ExecutorName,
    Only,
    Overrides,
    Plugins,
    Seeds,
    Store,
    Threads,
    Workers,
    console,
    make_runtime,
    register_all,
    split_lists,
)
from common.base import processes
from common.base.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.maps.report import MapBoard
    from benchmarks.maps.resolve import ResolvedMap
    from common.protocol.benchmark import Runtime

app = typer.Typer()


@app.command(
    epilog="Examples:  unlearn map digits-class  ·  unlearn map digits-class --plan  ·  unlearn "
    "map digits-class --only gd_ball,gd_lora --seeds 8,9  ·  unlearn map cifar10-small --data-root "
    "data --set map.lambdas=[0.3,3]  ·  unlearn map digits-class --report",
)
def map(
    name: Annotated[str, typer.Argument(help="Map name (see: unlearn ls maps) or YAML file.")],
    store: Store = STORE,
    data_root: DataRoot = None,
    set_: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    device: Device = "auto",
    threads: Threads = 1,
    workers: Workers = 0,
    executor: ExecutorName = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="Say what it costs; run nothing.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Show what is in the store; run nothing.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Map how forgiving methods are: learning rate x lambda x steps, judged against Retrain."""
    register_all(plugin)
    from benchmarks.audits.report import audit_tables
    from benchmarks.cli.session import run_with_audits
    from benchmarks.maps.report import make_board, probe_suite
    from benchmarks.maps.resolve import load_map
    from benchmarks.maps.write import write_map
    from common.store.stages import StageStore

    numbers, rows = split_lists(seeds, only)
    resolved = load_map(name, set_ or (), seeds=numbers, only=rows)
    if plan:
        print_plan(resolved)
        return
    runtime = make_runtime(store, data_root, device, threads, plugin)
    failed = {} if report else run_map(resolved, runtime, workers, executor)
    board = make_board(resolved, StageStore(runtime.store))
    suite = probe_suite(board)
    if suite.audits and not report and not failed:
        failed = run_with_audits(suite, runtime, workers, executor)[1]
        board.probes = audit_tables(suite, StageStore(runtime.store))
    if not board.lines and not failed:
        raise ConfigError(
            f"no complete seed of {resolved.name} in {store}; run: unlearn map {name}"
        )
    if not processes.is_main():
        return
    folder = write_map(board, runtime.store)
    print_map(board)
    console.print(f"\n[bold]Map[/bold]  {folder}/MAP.md (map.svg, map.json, cells.jsonl)")
    from benchmarks.cli.session import finish

    finish(failed)


def run_map(resolved: ResolvedMap, runtime: Runtime, workers: int, executor: str) -> dict[str, str]:
    """Runs every block that is not in the store; returns what failed."""
    from benchmarks.cli.session import working
    from benchmarks.maps.plan import planner_of
    from benchmarks.pipeline.schedule import run_suite

    with working(resolved.name, runtime, workers, executor) as (pool, display):
        execution = run_suite(
            resolved.suite, runtime, pool, watcher=display, planner=planner_of(resolved)
        )
    return execution.failed


def print_map(board: MapBoard) -> None:
    """The table, how to read it, and the paired differences."""
    from benchmarks.audits.report import print_audits
    from benchmarks.maps import report as boards
    from benchmarks.report.table import rich_table

    spec = board.resolved.spec
    title = f"{board.resolved.name} - {spec.title}" if spec.title else board.resolved.name
    console.print(
        rich_table(title, boards.table_heads(board), boards.table_rows(board), tight=True)
    )
    console.print(rich_table(None, boards.where_heads(board), boards.where_rows(board), tight=True))
    for line in boards.legend(board):
        console.print(line, style="dim", highlight=False, markup=False)
    console.print(rich_table("Accepted % per effective lr", *boards.rate_table(board)))
    for line in boards.comparison_lines(board):
        console.print(f"  {line}", highlight=False, markup=False)
    if board.resolved.probe:
        console.print(f"\n{boards.probe_text(board)}", highlight=False, markup=False)
        print_audits(console, board.probes)
    if board.missing:
        console.print(f"[yellow]Incomplete: {board.missing} blocks are missing.[/yellow]")


def print_plan(resolved: ResolvedMap) -> None:
    """Runs, optimizer steps and samples per method, from counts."""
    from benchmarks.maps.plan import runs_together
    from benchmarks.report.table import rich_table

    rows, seeds = [], len(resolved.spec.seeds)
    for row in resolved.rows:
        configs = [row.config(lr, lam) for lr in row.lrs for lam in row.lambdas]
        steps = len(configs) * max(row.steps)
        together = runs_together(row.cls, configs[0])
        block = min(resolved.spec.map.block, len(configs)) if together else 1
        cells = len(configs) * len(row.steps)
        batch = configs[0].batch_size
        rows.append([row.label, str(len(configs)), str(cells), str(steps), str(batch), str(block)])
        rows[-1].append(str(steps * seeds))
    heads = ["method", "runs/seed", "cells/seed", "steps/seed", "batch", "at once", "steps in all"]
    console.print(rich_table(f"{resolved.name}: {seeds} seeds", heads, rows))
    console.print(
        f"And {seeds} Originals and {2 * seeds} Retrains, shared with {resolved.spec.suite} where "
        "seeds agree; columns that are added to find an edge come on top.",
        highlight=False,
    )
    if resolved.probe:
        console.print(
            f"Then the probe ({', '.join(resolved.probe)}) of {len(rows)} best cells and "
            f"2 Retrains on {seeds} seeds.",
            highlight=False,
        )
