"""The commands that plan and run suites: ``plan`` and ``run``."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from stable_forgetting.benchmarks.audits.cost import costs, time_line
from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    Machine,
    Selection,
    Store,
    Workers,
    console,
    split_names,
)
from stable_forgetting.benchmarks.cli.progress import StepBar
from stable_forgetting.benchmarks.cli.session import finish, working
from stable_forgetting.benchmarks.costs.estimate import estimate_sections, estimates
from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.events import export_samples, read_runs
from stable_forgetting.benchmarks.leaderboard.freeing import free, freeable, remove_rows, told
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.run import execute
from stable_forgetting.benchmarks.leaderboard.samples import PAGE, write_samples
from stable_forgetting.benchmarks.leaderboard.tuning import skipped_lines
from stable_forgetting.benchmarks.paper.rehearsals import (
    full_suites,
    read_rehearsals,
    write_rehearsal,
)
from stable_forgetting.benchmarks.pipeline.executors import InlineExecutor, prepare_worker
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.runner import run_stage
from stable_forgetting.benchmarks.pipeline.schedule import events_folder
from stable_forgetting.benchmarks.pipeline.stage import Plan
from stable_forgetting.benchmarks.rehearsal import work
from stable_forgetting.benchmarks.rehearsal.suite import rehearsed
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.sweeps.report import grid_section
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import ConfigError, UserError
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import KEY_LENGTH, StageStore, check_writable
from stable_forgetting.common.train.tracking import check_tracker, send_runs

SECONDS = 0.5
"""Known time from which a plan says how long it takes."""


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
    resolved, stages = selection.suite(suite, store), StageStore(store)
    show(console, _plan_sections(make_plan(resolved, stages), stages, keys=keys))
    show(console, estimate_sections(estimates(resolved)))


def _plan_sections(planned: Plan, store: StageStore, *, keys: bool) -> list[Section]:
    suite, stages = planned.suite, list(planned.stages())
    done = {stage.key for stage in stages if store.done(stage.kind, stage.key) is not None}
    kinds = Counter(stage.kind for stage in stages)
    stored = Counter(stage.kind for stage in stages if stage.key in done)
    counts = [[k, str(n), str(n - stored[k]), str(stored[k])] for k, n in kinds.items()]
    by_kind = table(["kind", "planned", "to do", "stored"], counts)
    text = tuple(_plan_lines(planned, store, complete=len(done) == len(stages)))
    made = [Section(f"{suite.name}: {len(stages)} stages", text, by_kind)]
    if keys:
        listed = [
            [stage.name, stage.kind, stage.key[:KEY_LENGTH], "done" if stage.key in done else ""]
            for stage in stages
        ]
        content = table(["stage", "kind", "key", ""], listed, words=True)
        made.insert(0, Section(suite.name, content=content))
    return [*made, *([grid_section(suite)] if suite.spec.grid else ())]


def _plan_lines(planned: Plan, store: StageStore, *, complete: bool) -> Iterator[str]:
    """What a plan does not list: rows without stages, what follows, what it takes."""
    suite = planned.suite
    for label, reason in planned.inapplicable.items():
        yield f"{label}: not applicable ({reason}); it is not run"
    yield from skipped_lines(suite)
    if planned.undrawn:
        yield (
            f"Further rounds of tuning: {planned.undrawn} trial runs more, drawn from what those "
            "before have shown."
        )
    if planned.waiting and suite.spec.tune:
        yield (
            f"After tuning: {len(planned.waiting)} rows x {len(suite.spec.seeds)} seeds more "
            f"({', '.join(planned.waiting)})."
        )
    if suite.audits:
        models = "every row's best cell and of Retrain" if suite.spec.grid else "every model"
        yield f"Then the attacks on {models}: {', '.join(suite.audits)}."
    if complete:
        try:
            if unread := freeable(suite, store):
                yield f"Stored: {told(unread)}; run --free-weights deletes them."
        except UserError as error:
            yield f"Stored weights: which of them are still needed is not known: {error}"
    priced = costs(planned, store, ())
    if sum(cost.seconds or 0.0 for cost in priced if cost.missing) >= SECONDS:
        yield time_line(priced)


@dataclass(frozen=True)
class Way:
    """How a suite is run: whole, a single stage of it, or on trial."""

    fresh: Annotated[
        str | None, typer.Option(help="Make these rows again, comma-separated: ROW,ROW.")
    ] = None
    free_weights: Annotated[
        bool,
        typer.Option(
            "--free-weights", help="At the end delete stored weights that no further stage needs."
        ),
    ] = False
    samples: Annotated[
        bool,
        typer.Option("--samples", help="Write a page of forgotten samples and models' answers."),
    ] = False
    track: Annotated[
        str | None,
        typer.Option(
            help="Send the runs to trackers too, comma-separated: wandb, trackio, mlflow."
        ),
    ] = None
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Dry run on the CPU: small random models, few samples, first and last steps. It "
            "is deleted unless --store is given.",
        ),
    ] = False
    record: Annotated[
        Path | None,
        typer.Option(help="With --rehearse: write into this JSON file which suites succeeded."),
    ] = None
    stage: Annotated[
        str | None,
        typer.Option(
            help="Run one stage in this process, for launchers and big models: the start of its "
            "key (see plan --keys)."
        ),
    ] = None


@command(
    "unlearn run digits-class",
    "unlearn run cifar100-class10-small --data-root data",
    "unlearn run digits-all",
    "unlearn run digits-class --only gd_sine,gd_lora_omega --seeds 7,8,9 --set defaults.steps=300",
    "unlearn run digits-class --fresh gd_sine",
    "unlearn run digits-class --samples",
    "unlearn run digits-class --free-weights",
    "unlearn run digits-class --track wandb",
    "unlearn run tofu-llama2-7b-forget10 --rehearse",
    "unlearn run full --rehearse --record rehearsals.json",
    "unlearn run digits-class --stage KEY",
    "accelerate launch --multi_gpu -m stable_forgetting.benchmarks run lethevit-cifar10 "
    "--stage KEY",
)
def run(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(
            help="Suite name, group of suites, or YAML file; with --rehearse also full: every "
            "suite for a GPU."
        ),
    ],
    machine: Machine,
    selection: Selection,
    way: Way,
    workers: Workers = 0,
) -> None:
    """Run what the store lacks of a suite, and print its leaderboard.

    --rehearse tries every row from end to end first. --stage runs a single stage.
    """
    _check(way)
    if way.rehearse:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        chosen = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
        _rehearse_suites(suite, selection, machine, chosen, way.record)
    elif way.stage is not None:
        _run_stage(suite, way.stage, selection, machine)
    else:
        suites, runtime = selection.suites(suite, machine.store), machine.runtime()
        trackers = split_names(way.track, "--track")
        for name in trackers:
            check_tracker(name)
        if way.fresh:
            _remove_rows(suites, way.fresh, StageStore(runtime.store))
        failed: dict[str, str] = {}
        with working(runtime, workers) as (executor, watching):
            for each in suites:
                board, failed_here = execute(each, runtime, executor, partial(watching, each.name))
                failed |= failed_here
                show_board(board, runtime, samples=way.samples)
                _send(board, runtime, trackers)
        if way.free_weights and processes.is_main():
            _free_weights(suites, StageStore(runtime.store))
        finish(failed)


def _check(way: Way) -> None:
    """Refuses options that do not go together."""
    modes = [f"--{name}" for name in ("rehearse", "stage") if getattr(way, name)]
    extras = ("fresh", "samples", "free_weights", "track")
    given = [f"--{name.replace('_', '-')}" for name in extras if getattr(way, name)] + modes
    if modes and len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} do not go together; keep one")
    if way.record is not None and not way.rehearse:
        raise ConfigError("--record: only a rehearsal is recorded; add --rehearse")


def _remove_rows(suites: Sequence[ResolvedSuite], fresh: str, store: StageStore) -> None:
    if processes.is_main():
        labels = split_names(fresh, "--fresh")
        count = sum(remove_rows(suite, labels, store) for suite in suites)
        console.print(f"{count} stages of {', '.join(labels)} are made again")


def _free_weights(suites: Sequence[ResolvedSuite], store: StageStore) -> None:
    for suite in suites:
        weights = freeable(suite, store)
        console.print(f"{suite.name}: deleting {told(weights)}")
        free(weights, store)


def _send(board: Leaderboard, runtime: Runtime, trackers: Sequence[str]) -> None:
    if trackers and processes.is_main():
        runs = read_runs(board, StageStore(runtime.store))
        for name in trackers:
            send_runs(name, board.suite.name, runs)
            console.print(f"[bold]Tracker[/bold]      {len(runs)} runs sent to {name}")


def _run_stage(suite: str, key: str, selection: Selection, machine: Machine) -> None:
    resolved, runtime = selection.suite(suite, machine.store), machine.runtime()
    store = StageStore(runtime.store)
    hits = [each for each in make_plan(resolved, store).stages() if each.key.startswith(key)]
    if len(hits) != 1:
        raise ConfigError(
            f"key '{key}' fits {len(hits)} stages of {resolved.name}; see: unlearn "
            f"plan {shlex.quote(suite)} --keys"
        )
    (stage,) = hits
    store.sweep()
    prepare_worker(runtime.threads, runtime.plugins)
    events = events_folder(runtime, resolved.name, stage)
    with StepBar(console, stage.name) as progress:
        status = run_stage(stage, runtime, events=events, progress=progress)
    console.print(f"{stage.name}: {status}")


def _rehearse_suites(
    name: str, selection: Selection, machine: Machine, given: set[str], record: Path | None
) -> None:
    """Tries suites on the CPU and in a folder that is deleted; options that are ``given`` hold."""
    if record is not None and (selection.only or selection.set_ or selection.seeds):
        raise ConfigError("--record: a suite is rehearsed whole; leave --only, --set, --seeds out")
    if record is not None:
        check_writable(record.parent, "--record")
        read_rehearsals(record)  # what cannot be added to is refused before the work
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
    executor = InlineExecutor((runtime.threads, runtime.plugins))
    rows = []
    for row in work.rehearse(small, runtime, executor):
        rows.append(row)
        line = f"{suite.name}: {row['row']}: {row['']} ({row['s']} s)"
        console.print(line, markup=False, soft_wrap=True)
    show(console, [work.section(suite.name, rows, stand_in.notes)])
    return not any(map(work.failed, rows))


def show_board(board: Leaderboard, runtime: Runtime, *, samples: bool = False) -> None:
    """Prints a board, and where everything was written; writes the page of samples if asked."""
    show(console, sections(board))
    if samples and processes.is_main():
        export_samples(board, runtime.store, write_samples(board, runtime))
    written = runtime.store / "suites" / board.suite.name
    folder = escape(short_path(written))
    summary = runtime.store / "tensorboard" / board.suite.name / "summary"
    events = escape(shlex.quote(short_path(summary)))
    for text in (
        f"\n[bold]Report[/bold]       {folder}/LEADERBOARD.md (.html, .tex, .csv, .json, .svg)",
        f"[bold]Records[/bold]      {folder}/records.jsonl",
        f"[bold]TensorBoard[/bold]  tensorboard --logdir {events}",
    ):
        console.print(text, soft_wrap=True)
    if (written / PAGE).is_file():
        console.print(f"[bold]Samples[/bold]      {folder}/{PAGE}")


def short_path(path: Path) -> str:
    """A path as it can be typed here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
