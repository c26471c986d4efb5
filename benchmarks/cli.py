"""The ``unlearn`` command.  Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from common.errors import ConfigError, UserError

if TYPE_CHECKING:
    from benchmarks.leaderboard import Leaderboard
    from benchmarks.suite import ResolvedSuite
    from common.benchmark import Runtime

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Benchmark machine unlearning: suites in, leaderboards with noise floors out.",
    epilog="Examples:  unlearn demo  ·  unlearn run digits-class  ·  unlearn show gd_sine",
)
console = Console(width=None if sys.stdout.isatty() else 160)
error_console = Console(stderr=True)

Store = Annotated[Path, typer.Option(help="Root folder of everything written.")]
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder with local data sets.", envvar="SF_DATA_ROOT")
]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="Python file to load.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override: key.sub=value (repeatable).")
]
Seeds = Annotated[str | None, typer.Option(help="Comma-separated seeds, e.g. 1,2,3.")]
Only = Annotated[str | None, typer.Option(help="Only these rows, comma-separated.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Threads = Annotated[int, typer.Option(help="Torch threads of each process.", min=1)]
Workers = Annotated[
    int, typer.Option(help="Worker processes; 0: one per core on a CPU, one on a GPU.", min=0)
]
ExecutorName = Annotated[str, typer.Option("--executor", help="auto, inline, processes, ray.")]
STORE = Path("runs")
INTERRUPTED = 130


def _registered(plugins: list[str] | None) -> None:
    import benchmarks  # noqa: F401 - registers
    from common.registry import load_plugins

    load_plugins(plugins or ())


def _runtime(
    store: Path, data_root: Path | None, device: str, threads: int, plugins: list[str] | None
) -> Runtime:
    from common.benchmark import Runtime

    if data_root is not None and not data_root.is_dir():
        raise ConfigError(f"--data-root {data_root}: no such folder")
    existing = store.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--store {store}: {existing} is not a folder that can be written")
    return Runtime(
        store=store.absolute(),
        data_root=data_root and data_root.absolute(),
        device=device,
        threads=threads,
        plugins=tuple(str(Path(p).absolute()) for p in plugins or ()),
    )


def _suite(
    name: str, overrides: list[str] | None, seeds: str | None, only: str | None
) -> ResolvedSuite:
    from benchmarks.suite import load_suite

    try:
        numbers = [int(part) for part in seeds.split(",")] if seeds else None
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: write whole numbers with commas") from None
    rows = [part.strip() for part in only.split(",")] if only else []
    return load_suite(name, overrides or (), seeds=numbers, only=rows)


@app.command("ls", epilog="Examples:  unlearn ls  ·  unlearn ls methods  ·  unlearn ls suites")
def list_all(
    what: Annotated[str, typer.Argument(help="methods, suites, benchmarks, or all.")] = "all",
    plugin: Plugins = None,
) -> None:
    """List suites, methods and benchmarks."""
    _registered(plugin)
    from benchmarks.describe import left
    from benchmarks.render import rich_table
    from benchmarks.suite import find_suite, suite_names
    from common.config import read_yaml
    from common.registry import BENCHMARKS, METHODS

    if what not in ("all", "methods", "suites", "benchmarks"):
        raise ConfigError(f"ls {what}: choose methods, suites, benchmarks or all")
    if what in ("all", "suites"):
        rows = [[n, str(read_yaml(find_suite(n)).get("title", ""))] for n in suite_names()]
        console.print(left(rich_table("Suites", ["suite", "what it measures"], rows)))
    for kind, registry in (("methods", METHODS), ("benchmarks", BENCHMARKS)):
        if what in ("all", kind):
            rows = [[entry.name, entry.summary] for entry in registry]
            console.print(left(rich_table(kind.capitalize(), ["name", "what it is"], rows)))


@app.command(epilog="Examples:  unlearn show gd_sine  ·  unlearn show digits-class")
def show(
    name: Annotated[str, typer.Argument(help="A method, suite or benchmark.")],
    plugin: Plugins = None,
) -> None:
    """Show a method (formula, source, defaults, access) or a suite (its YAML)."""
    _registered(plugin)
    from benchmarks.describe import show_benchmark, show_method
    from benchmarks.suite import find_suite, suite_names
    from common.config import did_you_mean, read_yaml
    from common.registry import BENCHMARKS, METHODS

    if name in METHODS:
        show_method(console, name)
    elif name in suite_names() or name.endswith((".yaml", ".yml")):
        path = find_suite(name)
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        from rich.syntax import Syntax

        read_yaml(path)
        console.print(Syntax(path.read_text(encoding="utf-8"), "yaml", background_color="default"))
    elif name in BENCHMARKS:
        show_benchmark(console, name)
    else:
        known = [*METHODS.names(), *suite_names(), *BENCHMARKS.names()]
        raise ConfigError(f"nothing is called '{name}'{did_you_mean(name, known)}; see: unlearn ls")


@app.command(epilog="Examples:  unlearn plan digits-class  ·  unlearn plan digits-class --keys")
def plan(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    store: Store = STORE,
    set_: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every stage with its key.")] = False,
    plugin: Plugins = None,
) -> None:
    """Say which stages a suite needs, and which are in the store already."""
    _registered(plugin)
    from benchmarks.describe import left
    from benchmarks.plan import make_plan
    from benchmarks.render import rich_table
    from common.stages import KEY_LENGTH, StageStore

    resolved = _suite(suite, set_, seeds, only)
    stages_store = StageStore(store)
    planned = make_plan(resolved, stages_store)
    stages = list(planned.stages())
    done = {s.key for s in stages if stages_store.done(s.kind, s.key) is not None}
    if keys:
        rows = [
            [s.name, s.kind, s.key[:KEY_LENGTH], "done" if s.key in done else ""] for s in stages
        ]
        console.print(left(rich_table(resolved.name, ["stage", "kind", "key", ""], rows)))
    kinds = list(dict.fromkeys(stage.kind for stage in stages))
    rows = [
        [
            kind,
            str(sum(s.kind == kind for s in stages)),
            str(sum(s.kind == kind and s.key in done for s in stages)),
        ]
        for kind in kinds
    ]
    console.print(f"[bold]{resolved.name}[/bold]: {len(stages)} stages", highlight=False)
    console.print(rich_table(None, ["kind", "planned", "done"], rows))
    if planned.waiting:
        console.print(
            f"After tuning: {len(planned.waiting)} rows x "
            f"{len(resolved.spec.seeds)} seeds more ({', '.join(planned.waiting)})."
        )


@app.command(
    epilog="Examples:  unlearn run digits-class  ·  unlearn run cifar100-class10-small "
    "--data-root data  ·  unlearn run digits-class --only gd_sine,gd_lora_omega "
    "--seeds 7,8,9 --set defaults.steps=200"
)
def run(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    store: Store = STORE,
    data_root: DataRoot = None,
    set_: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    device: Device = "auto",
    threads: Threads = 1,
    workers: Workers = 0,
    executor: ExecutorName = "auto",
    plugin: Plugins = None,
) -> None:
    """Run a suite (what is in the store is not run again) and print its leaderboard."""
    _registered(plugin)
    from benchmarks.display import print_board, print_places

    resolved = _suite(suite, set_, seeds, only)
    runtime = _runtime(store, data_root, device, threads, plugin)
    board, failed = _run(resolved, runtime, workers, executor)
    print_board(console, board)
    print_places(console, resolved, runtime)
    _fail(failed)


def _run(
    suite: ResolvedSuite, runtime: Runtime, workers: int, executor: str
) -> tuple[Leaderboard, dict[str, str]]:
    from benchmarks.display import Display
    from benchmarks.executors import abandon, make_executor
    from benchmarks.leaderboard import make_leaderboard
    from benchmarks.schedule import run_suite
    from benchmarks.write import write_report
    from common.stages import StageStore

    pool = make_executor(
        executor, workers or _default_workers(runtime.device), runtime.threads, runtime.plugins
    )
    try:
        with Display(console, suite.name) as display:
            outcome = run_suite(suite, runtime, pool, watcher=display)
    except BaseException:
        abandon(pool)
        raise
    pool.shutdown()
    board = make_leaderboard(suite, StageStore(runtime.store))
    shown = (runtime.store / "tensorboard" / suite.name).is_dir()
    write_report(board, runtime.store, boards=outcome.executed > 0 or not shown)
    return board, outcome.failed


def _default_workers(device: str) -> int:
    if device.startswith("cuda"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if device == "auto" and Path("/dev/nvidia0").exists():
        return 1
    return max(1, min(cores, 8))


def _fail(failed: dict[str, str]) -> None:
    for text in failed.values():
        _tell(f"failed: {text}")
    if failed:
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  unlearn plan digits-class --keys, then: unlearn stage digits-class "
    "KEY  ·  accelerate launch -m benchmarks stage lethevit-cifar10 KEY"
)
def stage(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    key: Annotated[str, typer.Argument(help="Start of the stage's key (see plan --keys).")],
    store: Store = STORE,
    data_root: DataRoot = None,
    set_: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    device: Device = "auto",
    threads: Threads = 1,
    plugin: Plugins = None,
) -> None:
    """Run one stage in this process (and nothing else): for launchers and big models."""
    _registered(plugin)
    from benchmarks.display import StepBar
    from benchmarks.executors import prepare_worker
    from benchmarks.plan import make_plan
    from benchmarks.run import run_stage
    from benchmarks.schedule import board_folder
    from common.stages import StageStore

    resolved = _suite(suite, set_, seeds, only)
    runtime = _runtime(store, data_root, device, threads, plugin)
    stages = list(make_plan(resolved, StageStore(runtime.store)).stages())
    hits = [s for s in stages if s.key.startswith(key)]
    if len(hits) != 1:
        raise ConfigError(
            f"key '{key}' fits {len(hits)} stages of {resolved.name}; see: unlearn "
            f"plan {suite} --keys"
        )
    StageStore(runtime.store).sweep()
    prepare_worker(threads, runtime.plugins, orphan_guard=False)
    with StepBar(console, hits[0].name) as progress:
        status = run_stage(
            hits[0], runtime, board=board_folder(runtime, resolved.name, hits[0]), progress=progress
        )
    console.print(f"{hits[0].name}: {status}", highlight=False)


@app.command(
    epilog="Examples:  unlearn report digits-class  ·  unlearn report digits-class "
    "--format md > LEADERBOARD.md"
)
def report(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    store: Store = STORE,
    set_: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    format_: Annotated[
        str, typer.Option("--format", help="table, md, csv, json, html or svg.")
    ] = "table",
    plugin: Plugins = None,
) -> None:
    """Print a suite's leaderboard from the records that are there; runs nothing."""
    _registered(plugin)
    import json

    from benchmarks import render
    from benchmarks.display import print_board
    from benchmarks.leaderboard import make_leaderboard
    from benchmarks.published import published_tables
    from common.stages import StageStore

    resolved = _suite(suite, set_, seeds, only)
    board = make_leaderboard(resolved, StageStore(store))
    formats: dict[str, Callable[[Any], str]] = {
        "md": render.to_markdown,
        "csv": render.to_csv,
        "json": lambda b: json.dumps(render.to_json(b), indent=1, allow_nan=False) + "\n",
        "html": render.to_html,
        "svg": render.to_svg,
    }
    if format_ not in ("table", *formats):
        raise ConfigError(f"--format {format_}: choose table, {', '.join(formats)}")
    if not board.records:
        raise ConfigError(f"no records of {resolved.name} in {store}; run: unlearn run {suite}")
    if format_ != "table":
        sys.stdout.write(formats[format_](board))
        return
    print_board(console, board)
    for title, heads, rows in published_tables(resolved.spec.published):
        console.print()
        console.print(render.rich_table(title, heads, rows))


@app.command(
    epilog="Examples:  unlearn check gd_sine  ·  unlearn check --all  ·  unlearn check "
    "mine --plugin mine.py"
)
def check(
    name: Annotated[str | None, typer.Argument(help="A method.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every registered method.")] = False,
    plugin: Plugins = None,
) -> None:
    """Check a method against the harness's contract, on a tiny model."""
    _registered(plugin)
    from rich.markup import escape

    from common.checks import check_method
    from common.registry import METHODS

    if (name is None) == (not all_):
        raise ConfigError("check: give a method's name, or --all")
    broken = 0
    for method in METHODS.names() if all_ else [str(name)]:
        results = check_method(method)
        bad = [result for result in results if not result.ok]
        broken += bool(bad)
        mark = "[red]broken[/red]" if bad else "[green]ok[/green]"
        console.print(f"{mark}  {method}: {len(results) - len(bad)} of {len(results)} checks pass")
        for result in bad if all_ else results:
            sign = "[green]+[/green]" if result.ok else "[red]-[/red]"
            console.print(
                f"    {sign} {escape(result.name)}: {escape(result.detail)}", highlight=False
            )
    if broken:
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  unlearn apply --model my_vit/ --forget forget/ --retain retain/ --method "
    "gd_sine --out forgotten/  ·  unlearn apply --model vit.safetensors --arch "
    "vit_small_patch16_224 --num-classes 10 --forget forget/ --method ascent --out out/ "
    "--set lr=1e-5"
)
def apply(
    model: Annotated[
        Path, typer.Option(help="Folder (model.safetensors + config.json) or .safetensors file.")
    ],
    forget: Annotated[Path, typer.Option(help="Images to forget: CLASS/x.png.")],
    method: Annotated[str, typer.Option(help="A method (see: unlearn ls methods).")],
    out: Annotated[Path, typer.Option(help="New folder: merged model, adapter, audit.json.")],
    retain: Annotated[Path | None, typer.Option(help="Images to keep: CLASS/x.png.")] = None,
    test: Annotated[Path | None, typer.Option(help="Unseen images, for the audit only.")] = None,
    preset: Annotated[str | None, typer.Option(help="Preset of the method.")] = None,
    set_: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    arch: Annotated[str | None, typer.Option(help="timm name, for a bare file.")] = None,
    num_classes: Annotated[int | None, typer.Option(help="Classes, for a bare file.")] = None,
    device: Device = "auto",
    threads: Threads = 1,
    plugin: Plugins = None,
) -> None:
    """Make your own timm model forget your own folder of images."""
    _registered(plugin)
    from benchmarks.apply import ApplyRequest
    from benchmarks.apply import apply as run_apply

    result = run_apply(
        ApplyRequest(
            model=model,
            forget=forget,
            method=method,
            out=out,
            retain=retain,
            test=test,
            preset=preset,
            params=tuple(set_ or ()),
            seed=seed,
            arch=arch,
            num_classes=num_classes,
            device=device,
            threads=threads,
        )
    )
    console.print(result.message, highlight=False, markup=False)
    if result.status != "ok":
        raise typer.Exit(1)


@app.command(epilog="Examples:  unlearn doctor  ·  unlearn doctor --data-root data")
def doctor(store: Store = STORE, data_root: DataRoot = None) -> None:
    """Check this machine: packages, device, disk, data, network; each with its mend."""
    from rich.markup import escape

    from benchmarks.doctor import examine

    marks = {"ok": "[green]ok  [/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad [/red]"}
    findings = examine(store=store, data_root=data_root)
    for finding in findings:
        console.print(
            f"{marks[finding.verdict]} [bold]{finding.name}[/bold]: {escape(finding.detail)}",
            highlight=False,
        )
        if finding.mend:
            console.print(f"       -> {escape(finding.mend)}", highlight=False)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


@app.command(epilog="Examples:  unlearn demo  ·  unlearn demo --quick")
def demo(
    store: Store = STORE,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, fewer rows, a shorter training.")
    ] = False,
    workers: Workers = 0,
    threads: Threads = 1,
) -> None:
    """Class and random forgetting on real digits: about five minutes on two cores."""
    _registered(None)
    from benchmarks.display import print_board, print_places

    started = time.monotonic()
    runtime = _runtime(store, None, "cpu", threads, None)
    overrides, seeds, only = None, None, None
    if quick:
        overrides = ["protocol.train.epochs=12", "protocol.minimum_train_accuracy=95"]
        seeds, only = "1", "finetune,gd,gd_lora,gd_lora_omega,gd_sine"
    failed: dict[str, str] = {}
    suites = [_suite(name, overrides, seeds, only) for name in ("digits-class", "digits-random")]
    boards = []
    for suite in suites:
        board, lost = _run(suite, runtime, workers, "auto")
        boards.append(board)
        failed |= lost
    for board in boards:
        print_board(console, board)
    for suite in suites:
        print_places(console, suite, runtime)
    minutes = (time.monotonic() - started) / 60
    console.print(f"\nDone in {minutes:.1f} minutes. What next:", highlight=False)
    for line in (
        "unlearn report digits-class               the tables again, from the records",
        "unlearn show gd_sine                      what a method is, and its defaults",
        "unlearn run lethevit-cifar10-small        real CIFAR-10 on two cores (downloads, "
        "or --data-root)",
        "CONTRIBUTING.md                           add a baseline in 20 lines",
    ):
        console.print(f"  {line}", highlight=False)
    _fail(failed)


def _tell(text: str) -> None:
    """One line on stderr, however long."""
    line = " ".join(text.split())
    error_console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)


_USAGE: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""Base of the command line's own errors; where its module lies depends on Typer's version."""


def main() -> None:
    """Entry point: what the user can mend is one line and exit code 2."""
    logging.basicConfig(level=_log_level(), format="%(message)s")
    logging.captureWarnings(True)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except UserError as error:
        _tell(f"error: {error}")
        code = 2
    except _USAGE as error:
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        _tell(f"error: {error.format_message()}{hint}")
        code = 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        _tell(f"error: {error.filename or 'the store'}: {error.strerror}; mend it and run again")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        _tell("interrupted; what is complete is kept, run again to continue")
    sys.exit(code)


def _log_level() -> str:
    level = os.environ.get("SF_LOG", "WARNING").upper()
    return level if level in logging.getLevelNamesMapping() else "WARNING"


if __name__ == "__main__":
    main()
