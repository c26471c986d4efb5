"""The command ``report``, and the reports that come with the project."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    Selection,
    Store,
    check_format,
    console,
    error_console,
    no_records,
    split_names,
)
from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.live import HOST, serve
from stable_forgetting.benchmarks.leaderboard.paper_table import main_table
from stable_forgetting.benchmarks.leaderboard.picture import drawn_again
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.write import FORMATS
from stable_forgetting.benchmarks.paper.report import published_sections
from stable_forgetting.benchmarks.report.files import WRITERS
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.benchmarks.report.shipped import read_board, read_report, shipped_report
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.sharing.records import board_of, read_records
from stable_forgetting.benchmarks.suite.reading import suite_version
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import suite_names
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.stages import StageStore

SWEPT = "map.svg"
"""A sweep's picture among the shipped results."""
WITHDRAWN = "its suite has changed since: it compares no methods until the suite is run again"


@command(
    "unlearn report digits-class",
    "unlearn report digits-class --format tex > board.tex",
    "unlearn report digits-class --format tex --main --columns FA,RA,AG4 --names gd=GD --bold",
    "unlearn report digits-class --watch",
    "unlearn report digits-class --board",
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
    main: Annotated[
        bool, typer.Option("--main", help="Only the main table, as a paper prints it (md, tex).")
    ] = False,
    columns: Annotated[
        str | None, typer.Option(help="Columns of the main table, comma-separated: FA,RA,AG4.")
    ] = None,
    names: Annotated[str | None, typer.Option(help="Of its rows, as gd=GD,gd_sine=Sine.")] = None,
    bold: Annotated[
        bool, typer.Option("--bold", help="The best row of each of its columns is bold.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a page of the run as it goes, on this machine.")
    ] = False,
    board: Annotated[
        bool, typer.Option("--board", help="Open the suite's curves in TensorBoard.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of --watch and --board; 0 takes a free one.")
    ] = 8765,
) -> None:
    """Print a suite's leaderboard from stored records; run nothing.

    If there are no records, the report that comes with the project is shown.
    """
    check_format(format_, "table", *FORMATS)
    if (suite is None) == (records is None):
        raise ConfigError("report: give a suite, or --records FILE")
    command = selection.command(str(suite), store)
    if main or columns or names or bold:
        if not main or suite is None or format_ not in ("md", "tex"):
            raise ConfigError("report: --main and its options take a suite, and --format tex or md")
        given = _sections(selection.suite(suite, store), command, store)
        chosen = main_table(given, split_names(columns, "--columns"), _named(names), bold=bold)
        sys.stdout.write(WRITERS[format_](chosen))
    elif watch or board:
        if suite is None or format_ != "table":
            raise ConfigError("report --watch and --board: give a suite alone, no --format")
        resolved = selection.suite(suite, store)
        _watch(resolved, store, port) if watch else _board(resolved, command, store, port)
    elif records is not None:
        _print(_of_records(records, selection), format_)
    elif format_ == "table":
        for resolved in selection.suites(str(suite), store):
            _report(resolved, command, store, format_)
    else:
        _report(selection.suite(str(suite), store), command, store, format_)


def _of_records(file: Path, selection: Selection) -> Leaderboard:
    if selection != Selection(plugin=selection.plugin):
        raise ConfigError("report --records: --set, --seeds and --only go with a suite")
    return board_of(read_records(file), file)


def _named(text: str | None) -> dict[str, str]:
    """Label -> name of ``gd=GD,gd_sine=Sine``."""
    pairs = [item.partition("=") for item in split_names(text, "--names")]
    named = {label.strip(): name.strip() for label, _, name in pairs}
    if len(named) < len(pairs) or not all(label and name for label, name in named.items()):
        raise ConfigError(f"--names {text}: write LABEL=NAME, each label once, several by commas")
    return named


def _sections(suite: ResolvedSuite, command: str, store: Path) -> list[Section]:
    """A suite's leaderboard from the store, or as it comes with the project."""
    board = make_leaderboard(suite, StageStore(store))
    if board.records:
        return sections(board)
    return read_report(shipped_text(suite.name, store, command, "md"))


def _watch(suite: ResolvedSuite, store: Path, port: int) -> None:
    """Serves the page of a run until the user ends it."""
    with serve(suite, StageStore(store), port) as server:
        console.print(f"{suite.name}: http://{HOST}:{server.server_port}")
        console.print("Ctrl-C ends the page; the run goes on.")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _board(suite: ResolvedSuite, command: str, store: Path, port: int) -> None:
    """Becomes TensorBoard on a suite's events."""
    folder = store / "tensorboard" / suite.name
    if next(folder.rglob("events.*"), None) is None:
        raise ConfigError(f"no events of {suite.name} in {store}; run: {command}")
    asked = ("--logdir", str(folder), "--port", str(port))
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", *asked])


def _report(suite: ResolvedSuite, command: str, store: Path, form: str) -> None:
    board = make_leaderboard(suite, StageStore(store))
    if board.records:
        _print(board, form)
    elif form == "table":
        show_shipped(suite.name, store, command)
    else:
        sys.stdout.write(shipped_text(suite.name, store, command, form))


def _print(board: Leaderboard, form: str) -> None:
    if form == "table":
        show(console, sections(board) + published_sections(board.suite.spec.published))
    else:
        sys.stdout.write(FORMATS[form][1](board))


def show_shipped(name: str, store: Path, command: str, *, under: str = "") -> None:
    """Prints the head of a shipped report, or what is under one of its headings.

    Args:
        command: What makes the records.
        under: Heading; the report's own when empty.

    Raises:
        ConfigError: Nothing is shipped.
    """
    missing, file = no_records(name, store, command), shipped_report(name)
    chosen = _part(read_report(file.read_text("utf-8")), under) if file else []
    if file is None or not chosen:
        raise ConfigError(missing)
    _say(missing, f"{file} comes with the project; from it:")
    if name in suite_names() and read_board(file.parent)["version"] != suite_version(name):
        _say("", WITHDRAWN)
    show(console, chosen)


def shipped_text(name: str, store: Path, command: str, form: str) -> str:
    """A shipped report in a format.

    Raises:
        ConfigError: Nothing is shipped in this format.
    """
    missing, file = no_records(name, store, command), shipped_report(name)
    if file is not None and form not in WRITERS:
        drawn = form == "svg" and (file.parent / SWEPT).is_file()
        other = SWEPT if drawn else "runs.csv" if form in ("csv", "runs") else "leaderboard.json"
        file = file.with_name(other)
    if file is None or not file.is_file():
        raise ConfigError(missing)
    _say(missing, f"{file} comes with the project")
    if form == "svg" and file.name != SWEPT:
        return drawn_again(read_board(file.parent)).svg
    text = file.read_text("utf-8")
    return WRITERS[form](read_report(text)) if form in WRITERS and form != "md" else text


def _say(missing: str, instead: str) -> None:
    text = "; ".join(filter(None, (missing.partition(";")[0], instead)))
    error_console.print(text, style="dim", markup=False, soft_wrap=True)


def _part(sections: Sequence[Section], under: str) -> list[Section]:
    """The sections before the first further heading, or those below one."""
    heads = [place for place, section in enumerate(sections) if section.title]
    first = next((p for p in heads if sections[p].title == under or not under), None)
    if first is None:
        return []
    depth = sections[first].depth if under else 2
    end = next((p for p in heads if p > first and sections[p].depth <= depth), len(sections))
    return list(sections[first:end])
