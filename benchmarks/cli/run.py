"""The commands on suites: ``plan``, ``run``, ``report`` and ``stage``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    Machine,
    Pool,
    Selection,
    Store,
    console,
)
from stable_forgetting.benchmarks.cli.session import executing, finish, watching
from stable_forgetting.benchmarks.pipeline.stage import Plan
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.stages import KEY_LENGTH, StageStore

SECONDS = 0.5
"""Known time from which a plan says how long it takes."""

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
    from stable_forgetting.common.protocol.benchmark import Runtime


@command(
    "unlearn plan digits-class",
    "unlearn plan digits-class --keys",
    "unlearn plan tofu-llama2-7b-forget10",
)
def plan(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    selection: Selection,
    store: Store = STORE,
    keys: Annotated[bool, typer.Option("--keys", help="List every stage with its key.")] = False,
) -> None:
    """Print which stages a suite needs, which are stored, and their cost on a GPU (derived)."""
    from stable_forgetting.benchmarks.costs.estimate import estimates
    from stable_forgetting.benchmarks.costs.report import estimate_sections
    from stable_forgetting.benchmarks.pipeline.planner import make_plan

    resolved, stages = selection.suite(suite, store), StageStore(store)
    show(console, _plan_sections(make_plan(resolved, stages), stages, keys=keys))
    show(console, estimate_sections(estimates(resolved)))


def _plan_sections(planned: Plan, store: StageStore, *, keys: bool) -> list[Section]:
    from stable_forgetting.benchmarks.audits.cost import costs, time_line
    from stable_forgetting.benchmarks.leaderboard.tuning import skipped_lines
    from stable_forgetting.benchmarks.sweeps.report import grid_section

    suite, stages = planned.suite, list(planned.stages())
    done = {stage.key for stage in stages if store.done(stage.kind, stage.key) is not None}
    listed = [
        [stage.name, stage.kind, stage.key[:KEY_LENGTH], "done" if stage.key in done else ""]
        for stage in stages
    ]
    counts = []
    for kind in dict.fromkeys(stage.kind for stage in stages):
        own = [stage for stage in stages if stage.kind == kind]
        stored = sum(stage.key in done for stage in own)
        counts.append([kind, str(len(own)), str(len(own) - stored), str(stored)])
    text = [
        f"{label}: not applicable ({reason}); it is not run"
        for label, reason in planned.inapplicable.items()
    ]
    text += skipped_lines(suite)
    if planned.undrawn:
        text.append(
            f"Further rounds of tuning: {planned.undrawn} trial runs more, drawn from what those "
            "before have shown."
        )
    if planned.waiting and suite.spec.tune:
        text.append(
            f"After tuning: {len(planned.waiting)} rows x {len(suite.spec.seeds)} seeds more "
            f"({', '.join(planned.waiting)})."
        )
    if suite.audits:
        models = "every row's best cell and of Retrain" if suite.spec.grid else "every model"
        text.append(f"Then the audits of {models}: {', '.join(suite.audits)}.")
    priced = costs(planned, store, ())
    known = sum(cost.seconds or 0.0 for cost in priced if cost.missing)
    if known >= SECONDS:
        text.append(time_line(priced))
    heads = ["stage", "kind", "key", ""]
    by_stage = Section(suite.name, content=table(heads, listed, words=True))
    by_kind = table(["kind", "planned", "to do", "stored"], counts)
    title = f"{suite.name}: {len(stages)} stages"
    of_grid = [grid_section(suite)] if suite.spec.grid else []
    return [*([by_stage] if keys else ()), Section(title, tuple(text), by_kind), *of_grid]


@command(
    "unlearn run digits-class",
    "unlearn run cifar100-class10-small --data-root data",
    "unlearn run digits-all",
    "unlearn run digits-class --only gd_sine,gd_lora_omega --seeds 7,8,9 --set defaults.steps=300",
    "unlearn run digits-class --fresh gd_sine",
    "unlearn run digits-class --samples",
)
def run(
    suite: Annotated[str, typer.Argument(help="Suite name, group of suites, or YAML file.")],
    machine: Machine,
    selection: Selection,
    pool: Pool,
    fresh: Annotated[
        str | None, typer.Option(help="Make these rows again, comma-separated: ROW,ROW.")
    ] = None,
    samples: Annotated[
        bool,
        typer.Option("--samples", help="Write a page of forgotten samples and models' answers."),
    ] = False,
) -> None:
    """Run what the store lacks of a suite, and print its leaderboard."""
    from stable_forgetting.benchmarks.leaderboard.run import execute

    suites, runtime = selection.suites(suite, machine.store), machine.runtime()
    if fresh:
        _remove_rows(suites, [label.strip() for label in fresh.split(",")], runtime)
    failed: dict[str, str] = {}
    with executing(runtime, pool) as executor:
        for each in suites:
            shown = partial(watching, each.name, runtime, pool)
            board, failed_here = execute(each, runtime, executor, shown)
            failed |= failed_here
            show_board(board, runtime, samples=samples)
    finish(failed)


def _remove_rows(suites: Sequence[ResolvedSuite], labels: list[str], runtime: Runtime) -> None:
    from stable_forgetting.benchmarks.leaderboard.fresh import remove_rows

    if not processes.is_main():
        return
    count = sum(remove_rows(suite, labels, StageStore(runtime.store)) for suite in suites)
    console.print(f"{count} stages of {', '.join(labels)} are made again", highlight=False)


def show_board(board: Leaderboard, runtime: Runtime, *, samples: bool = False) -> None:
    """Prints a board, and where everything was written; writes the page of samples if asked."""
    from stable_forgetting.benchmarks.leaderboard.report import sections
    from stable_forgetting.benchmarks.leaderboard.samples import PAGE, write_samples

    show(console, sections(board))
    if samples and processes.is_main():
        write_samples(board, runtime)
    written = runtime.store / "suites" / board.suite.name
    folder = short_path(written)
    events = short_path(runtime.store / "tensorboard" / board.suite.name / "summary")
    for text in (
        f"\n[bold]Report[/bold]       {folder}/LEADERBOARD.md (.html, .tex, .csv, .json, .svg)",
        f"[bold]Records[/bold]      {folder}/records.jsonl",
        f"[bold]TensorBoard[/bold]  tensorboard --logdir {events}",
    ):
        console.print(text, highlight=False)
    if (written / PAGE).is_file():
        console.print(f"[bold]Samples[/bold]      {folder}/{PAGE}", highlight=False)


def short_path(path: Path) -> str:
    """A path as it can be typed here."""
    return escape(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


@command(
    "unlearn plan digits-class --keys",
    "unlearn stage digits-class KEY",
    "accelerate launch --multi_gpu -m stable_forgetting.benchmarks stage lethevit-cifar10 KEY",
)
def stage(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    key: Annotated[str, typer.Argument(help="Start of the stage's key (see plan --keys).")],
    machine: Machine,
    selection: Selection,
) -> None:
    """Run one stage in this process, for launchers and big models."""
    from stable_forgetting.benchmarks.cli.progress import StepBar
    from stable_forgetting.benchmarks.pipeline.executors import prepare_worker
    from stable_forgetting.benchmarks.pipeline.planner import make_plan
    from stable_forgetting.benchmarks.pipeline.runner import run_stage
    from stable_forgetting.benchmarks.pipeline.schedule import events_folder

    resolved, runtime = selection.suite(suite, machine.store), machine.runtime()
    stages = list(make_plan(resolved, StageStore(runtime.store)).stages())
    hits = [stage for stage in stages if stage.key.startswith(key)]
    if len(hits) != 1:
        raise ConfigError(
            f"key '{key}' fits {len(hits)} stages of {resolved.name}; see: unlearn "
            f"plan {suite} --keys"
        )
    StageStore(runtime.store).sweep()
    prepare_worker(runtime.threads, runtime.plugins)
    with StepBar(console, hits[0].name) as progress:
        status = run_stage(
            hits[0],
            runtime,
            events=events_folder(runtime, resolved.name, hits[0]),
            progress=progress,
        )
    console.print(f"{hits[0].name}: {status}", highlight=False)


@command(
    "unlearn report digits-class",
    "unlearn report digits-class --format tex > board.tex",
    "unlearn report digits-class --watch",
    "unlearn report --records their-records.jsonl",
)
def report(
    selection: Selection,
    suite: Annotated[
        str | None, typer.Argument(help="Suite name, group of suites, or YAML file.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Read a file of records, or a folder with one, instead.")
    ] = None,
    store: Store = STORE,
    format_: Annotated[
        str,
        typer.Option("--format", help="table, md, tex, csv (rows), runs (csv), json, html, svg."),
    ] = "table",
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a page of the run as it goes, on this machine.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of that page; 0 takes a free one.")
    ] = 8765,
) -> None:
    """Print a suite's leaderboard from stored records; run nothing.

    If there are no records, the report that comes with the project is shown.
    """
    from stable_forgetting.benchmarks.leaderboard.write import FORMATS

    if format_ not in ("table", *FORMATS):
        raise ConfigError(f"--format {format_}: choose table, {', '.join(FORMATS)}")
    if (suite is None) == (records is None):
        raise ConfigError("report: give a suite, or --records FILE")
    if watch:
        if suite is None:
            raise ConfigError("report --watch: give a suite; a file of records does not change")
        _watch(selection.suite(suite, store), store, port)
    elif records is not None:
        from stable_forgetting.benchmarks.sharing.records import board_of, read_records

        _print(board_of(read_records(records), records), format_)
    elif format_ == "table":
        for resolved in selection.suites(str(suite), store):
            _report(resolved, str(suite), store, format_)
    else:
        _report(selection.suite(str(suite), store), str(suite), store, format_)


def _watch(suite: ResolvedSuite, store: Path, port: int) -> None:
    """Serves the page of a run until the user ends it."""
    from stable_forgetting.benchmarks.leaderboard.live import HOST, serve

    with serve(suite, StageStore(store), port) as server:
        console.print(f"{suite.name}: http://{HOST}:{server.server_port}", highlight=False)
        console.print("Ctrl-C ends the page; the run goes on.", highlight=False)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _report(suite: ResolvedSuite, called: str, store: Path, form: str) -> None:
    from stable_forgetting.benchmarks.cli.shipped import show_shipped, write_shipped
    from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard

    board = make_leaderboard(suite, StageStore(store))
    missing = f"no records of {suite.name} in {store}; run: unlearn run {called}"
    if board.records:
        _print(board, form)
    elif form == "table":
        show_shipped(suite.name, missing)
    else:
        write_shipped(suite.name, missing, form)


def _print(board: Leaderboard, form: str) -> None:
    from stable_forgetting.benchmarks.leaderboard.report import sections
    from stable_forgetting.benchmarks.leaderboard.write import FORMATS
    from stable_forgetting.benchmarks.paper.report import published_sections

    if form == "table":
        show(console, sections(board) + published_sections(board.suite.spec.published))
    else:
        sys.stdout.write(FORMATS[form][1](board))
