"""The ``unlearn`` command.  Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli import audit
from benchmarks.cli import map as map_commands
from benchmarks.cli import rows as commands
from benchmarks.cli.options import (
    STORE,
    DataRoot,
    Only,
    Overrides,
    Plugins,
    Seeds,
    Store,
    console,
    register_all,
    resolve_suite,
    resolve_suites,
    tell,
)
from common.base import processes
from common.base.errors import ConfigError, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.leaderboard.board import Leaderboard
    from benchmarks.spec.resolve import ResolvedSuite

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Benchmark machine unlearning: suites in, leaderboards with noise floors out.",
    epilog="Examples:  unlearn demo  ·  unlearn run digits-class  ·  unlearn show gd_sine",
)
INTERRUPTED = 130


@app.command("ls", epilog="Examples:  unlearn ls  ·  unlearn ls methods  ·  unlearn ls suites")
def list_all(
    what: Annotated[str, typer.Argument(help="methods, suites, maps, benchmarks, or all.")] = "all",
    plugin: Plugins = None,
) -> None:
    """List suites, maps, methods and benchmarks."""
    register_all(plugin)
    from benchmarks.maps.resolve import find_map, map_names
    from benchmarks.report.table import left, rich_table
    from benchmarks.spec.suite import find_suite, suite_groups, suite_names
    from common.base.config import read_yaml
    from common.base.registry import BENCHMARKS, METHODS
    from common.bounded.presets import PRESETS

    if what not in ("all", "methods", "suites", "maps", "benchmarks"):
        raise ConfigError(f"ls {what}: choose methods, suites, maps, benchmarks or all")
    if what in ("all", "suites"):
        rows = [[n, str(read_yaml(find_suite(n)).get("title", ""))] for n in suite_names()]
        rows += [[name, ", ".join(suites)] for name, suites in suite_groups().items()]
        console.print(left(rich_table("Suites", ["suite", "what it measures"], rows)))
    if what in ("all", "maps"):
        rows = [[n, str(read_yaml(find_map(n)).get("title", ""))] for n in map_names()]
        console.print(left(rich_table("Stability maps", ["map", "what it asks"], rows)))
    for kind, registry in (("methods", METHODS), ("benchmarks", BENCHMARKS)):
        if what in ("all", kind):
            rows = [[entry.name, entry.summary] for entry in registry]
            console.print(left(rich_table(kind.capitalize(), ["name", "what it is"], rows)))
    if what in ("all", "methods"):
        rows = [[f"METHOD_{name}", preset.through] for name, preset in PRESETS.items()]
        title = "Any method with an adapter, through"
        console.print(left(rich_table(title, ["name", "what is trained"], rows)))


@app.command(
    epilog="Examples:  unlearn show gd_sine  ·  unlearn show digits-class  ·  unlearn show bounded "
    "--plan llama-2-7b --rank 8 --tokens 4096"
)
def show(
    name: Annotated[str, typer.Argument(help="A method, suite or benchmark, or: bounded.")],
    plan: Annotated[
        str | None, typer.Option("--plan", help="Model whose costs with bounded layers to show.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Rank of --plan.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens per forward of --plan.", min=1)] = 4096,
    placement: Annotated[str, typer.Option(help="Of --plan: mlp, attention or all.")] = "mlp",
    plugin: Plugins = None,
) -> None:
    """Show a method (formula, source, defaults), a suite (YAML, adapters' sizes), or the layer."""
    if name == "bounded":
        from benchmarks.costs.model import make_plan
        from benchmarks.costs.tables import show_bounded

        sizes = {"rank": rank, "tokens": tokens}
        found = None if plan is None else make_plan(plan, placement=placement, **sizes)
        show_bounded(console, found)
        return
    if plan is not None:
        raise ConfigError(f"show {name} --plan: only the layer has one: show bounded --plan {plan}")
    register_all(plugin)
    from benchmarks.cli.show import show_benchmark, show_method, show_suite
    from benchmarks.spec.suite import find_suite, suite_names
    from common.base.config import did_you_mean
    from common.base.registry import BENCHMARKS, METHODS

    if name in METHODS:
        show_method(console, name)
    elif name in suite_names() or name.endswith((".yaml", ".yml")):
        path = find_suite(name)
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        show_suite(console, name)
    elif name in BENCHMARKS:
        show_benchmark(console, name)
    else:
        known = [*METHODS.names(), *suite_names(), *BENCHMARKS.names(), "bounded"]
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
    register_all(plugin)
    from benchmarks.pipeline.planner import make_plan
    from benchmarks.report.table import left, rich_table
    from common.store.stages import KEY_LENGTH, StageStore

    resolved = resolve_suite(suite, set_, seeds, only)
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
    for label, reason in planned.inapplicable.items():
        console.print(f"{label}: not applicable ({reason}); it is not run", highlight=False)
    if planned.undrawn:
        console.print(
            f"Further rounds of tuning: {planned.undrawn} trial runs more, drawn from what those "
            "before have shown."
        )
    if planned.waiting:
        console.print(
            f"After tuning: {len(planned.waiting)} rows x "
            f"{len(resolved.spec.seeds)} seeds more ({', '.join(planned.waiting)})."
        )
    if resolved.audits:
        console.print(f"Then the audits of every model: {', '.join(resolved.audits)}.")


@app.command(
    epilog="Examples:  unlearn report digits-class  ·  unlearn report digits-class "
    "--format md > LEADERBOARD.md"
)
def report(
    suite: Annotated[str, typer.Argument(help="Suite name, group of suites, or YAML file.")],
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
    register_all(plugin)
    import json

    from benchmarks.leaderboard import picture as page
    from benchmarks.leaderboard import report as render
    from benchmarks.leaderboard.report import print_board
    from benchmarks.report.table import rich_table
    from benchmarks.spec.published import published_tables

    formats: dict[str, Callable[[Any], str]] = {
        "md": render.to_markdown,
        "csv": render.to_csv,
        "json": lambda b: json.dumps(render.to_json(b), indent=1, allow_nan=False) + "\n",
        "html": page.to_html,
        "svg": page.to_svg,
    }
    if format_ not in ("table", *formats):
        raise ConfigError(f"--format {format_}: choose table, {', '.join(formats)}")
    if format_ != "table":
        board = _board(resolve_suite(suite, set_, seeds, only), store, suite)
        sys.stdout.write(formats[format_](board))
        return
    boards = [_board(each, store, suite) for each in resolve_suites(suite, set_, seeds, only)]
    for board in boards:
        print_board(console, board)
        for title, heads, rows in published_tables(board.suite.spec.published):
            console.print()
            console.print(rich_table(title, heads, rows))


def _board(suite: ResolvedSuite, store: Path, called: str) -> Leaderboard:
    from benchmarks.leaderboard.derive import make_leaderboard
    from common.store.stages import StageStore

    board = make_leaderboard(suite, StageStore(store))
    if not board.records:
        raise ConfigError(f"no records of {suite.name} in {store}; run: unlearn run {called}")
    return board


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
    register_all(plugin)
    from rich.markup import escape

    from common.base.registry import METHODS
    from common.checks import check_method

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


@app.command(epilog="Examples:  unlearn doctor  ·  unlearn doctor --data-root data")
def doctor(store: Store = STORE, data_root: DataRoot = None) -> None:
    """Check this machine: packages, device, disk, data, network; each with its mend."""
    from rich.markup import escape

    from benchmarks.machine.doctor import examine

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


@app.command(epilog="Example:  unlearn verify tofu-logs --data-root data")
def verify(
    what: Annotated[str, typer.Argument(help="tofu-logs: published TOFU evaluation logs.")],
    data_root: DataRoot = None,
) -> None:
    """Recompute published results with our own metric code, and show every difference."""
    from benchmarks.machine.verify import nearest_to_paper, print_rows, verify_tofu_logs

    if what != "tofu-logs":
        raise ConfigError(f"verify {what}: there is only tofu-logs")
    if data_root is None:
        raise ConfigError("verify tofu-logs: give the folder of tofu_eval_logs/ as --data-root")
    rows = verify_tofu_logs(data_root)
    print_rows(console, rows, nearest_to_paper(data_root))
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


app.registered_commands += commands.app.registered_commands
app.registered_commands += audit.app.registered_commands
app.registered_commands += map_commands.app.registered_commands

_USAGE: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""Base of the command line's own errors; where its module lies depends on Typer's version."""


def main() -> None:
    """Entry point: what the user can mend is one line and exit code 2."""
    logging.basicConfig(level=_log_level(), format="%(message)s")
    logging.captureWarnings(True)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        processes.leave()
    except UserError as error:
        tell(f"error: {error}")
        code = 2
    except _USAGE as error:
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        tell(f"error: {error.format_message()}{hint}")
        code = 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        tell(f"error: {error.filename or 'the store'}: {error.strerror}; mend it and run again")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        tell("interrupted; what is complete is kept, run again to continue")
    sys.exit(code)


def _log_level() -> str:
    level = os.environ.get("SF_LOG", "WARNING").upper()
    return level if level in logging.getLevelNamesMapping() else "WARNING"


if __name__ == "__main__":
    main()
