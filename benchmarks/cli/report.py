"""The command ``report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.command import command
from benchmarks.cli.options import STORE, Selection, Store, console
from common.base.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.leaderboard.board import Leaderboard
    from benchmarks.spec.resolve import ResolvedSuite


@command("unlearn report digits-class", "unlearn report digits-class --format md > LEADERBOARD.md")
def report(
    suite: Annotated[str, typer.Argument(help="Suite name, group of suites, or YAML file.")],
    selection: Selection,
    store: Store = STORE,
    format_: Annotated[
        str, typer.Option("--format", help="table, md, csv, json, html or svg.")
    ] = "table",
) -> None:
    """Print a suite's leaderboard from the records that are there; runs nothing."""
    from benchmarks.leaderboard.report import published_sections, sections
    from benchmarks.leaderboard.write import FORMATS
    from benchmarks.report.terminal import show

    if format_ not in ("table", *FORMATS):
        raise ConfigError(f"--format {format_}: choose table, {', '.join(FORMATS)}")
    if format_ != "table":
        board = _board(selection.suite(suite), store, suite)
        sys.stdout.write(FORMATS[format_][1](board))
        return
    for board in [_board(each, store, suite) for each in selection.suites(suite)]:
        show(console, sections(board) + published_sections(board.suite.spec.published))


def _board(suite: ResolvedSuite, store: Path, called: str) -> Leaderboard:
    from benchmarks.leaderboard.derive import make_leaderboard
    from common.store.stages import StageStore

    board = make_leaderboard(suite, StageStore(store))
    if not board.records:
        raise ConfigError(f"no records of {suite.name} in {store}; run: unlearn run {called}")
    return board
