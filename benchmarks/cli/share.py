"""The commands on results that come and go: ``compare``, ``versus``, ``submit``, ``site``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    Plugins,
    Selection,
    Store,
    console,
    register_all,
)
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.leaderboard.board import Leaderboard

GIVEN = "Suite, STORE:SUITE, file of records, bundle, or folder of results."


@command(
    "unlearn compare digits-class+85a134 digits-class",
    "unlearn compare runs:digits-class theirs/runs:digits-class",
    "unlearn compare digits-class their-records.jsonl --format csv",
)
def compare(
    first: Annotated[str, typer.Argument(help=GIVEN)],
    second: Annotated[str, typer.Argument(help=GIVEN)],
    selection: Selection,
    store: Store = STORE,
    format_: Annotated[
        str, typer.Option("--format", help="table, md, tex, html, or csv (every metric).")
    ] = "table",
) -> None:
    """Compare two results, paired by row, seed and split: differences with 95 % CIs."""
    from stable_forgetting.benchmarks.report import html, markdown, tex
    from stable_forgetting.benchmarks.sharing import compare as job
    from stable_forgetting.benchmarks.sharing.results import read_results

    writers = {"md": markdown.write, "tex": tex.write, "html": html.write}
    if format_ not in ("table", "csv", *writers):
        raise ConfigError(f"--format {format_}: choose table, csv, {', '.join(writers)}")

    def board(suite: str, own: Path | None) -> Leaderboard | None:
        return read_board(selection, suite, own or store)

    comparison = job.compare(read_results(first, board), read_results(second, board))
    if format_ == "csv":
        sys.stdout.write(job.to_csv(comparison))
    elif format_ == "table":
        show(console, job.sections(comparison))
    else:
        sys.stdout.write(writers[format_](job.sections(comparison)))


@command(
    "unlearn versus",
    "unlearn versus gd_sine,gd_lora gd_ball,gd_lora --filter tofu",
    "unlearn versus gd_ul_tanh_tight,gd_ul --format svg > bound.svg",
)
def versus(
    pairs: Annotated[
        list[str] | None,
        typer.Argument(help="Two rows, FIRST,SECOND. Default: rows with and without a bound."),
    ] = None,
    words: Annotated[
        str, typer.Option("--filter", help="Only suites with all these words in their name.")
    ] = "",
    store: Store = STORE,
    format_: Annotated[
        str, typer.Option("--format", help="table, md, tex, html (with picture), csv, or svg.")
    ] = "table",
) -> None:
    """Compare two rows in every table that has both, shipped or in the store.

    Distances to Retrain (or to the goals) are paired by seed. p is corrected for the tables.
    """
    from stable_forgetting.benchmarks.report import html, markdown, tex
    from stable_forgetting.benchmarks.report.shipped import RESULTS
    from stable_forgetting.benchmarks.sharing import versus as job
    from stable_forgetting.benchmarks.sharing.versus_picture import picture

    writers = {"md": markdown.write, "tex": tex.write, "html": html.write}
    if format_ not in ("table", "csv", "svg", *writers):
        raise ConfigError(f"--format {format_}: choose table, csv, svg, {', '.join(writers)}")
    asked = [_two(pair) for pair in pairs or ()] or job.CLAIMS
    met, withdrawn = job.encounters(asked, [RESULTS, store / "suites"], words)
    if format_ == "table":
        show(console, job.sections(met, withdrawn))
    elif format_ in writers:
        drawn = [Section(content=picture(met))] if format_ == "html" else []
        sys.stdout.write(writers[format_]([*job.sections(met, withdrawn), *drawn]))
    else:
        sys.stdout.write(job.to_csv(met) if format_ == "csv" else picture(met).svg)


def _two(pair: str) -> tuple[str, str]:
    names = [name.strip() for name in pair.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise ConfigError(f"versus {pair}: write two different rows as FIRST,SECOND")
    return names[0], names[1]


def read_board(selection: Selection, suite: str, store: Path) -> Leaderboard | None:
    """The leaderboard of a store; None where it has no record of the suite."""
    from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard

    board = make_leaderboard(selection.suite(suite, store), StageStore(store))
    return board if board.records else None


@command("unlearn submit digits-class --out digits.zip", "unlearn submit mine.yaml --out bundle")
def submit(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    out: Annotated[Path, typer.Option(help="A new folder, or a new file called *.zip.")],
    selection: Selection,
    store: Store = STORE,
) -> None:
    """Write a bundle of records and scores from which others recompute a suite's table.

    It holds configs, digests, numbers per sample and the environment. It holds no text, image or
    weight.
    """
    from stable_forgetting.benchmarks.sharing.bundle import write_bundle

    board = read_board(selection, suite, store)
    if board is None:
        raise ConfigError(f"no records of {suite} in {store}; run: unlearn run {suite}")
    count = write_bundle(board, StageStore(store), out)
    console.print(
        f"{out}: {count} files; check it anywhere with: unlearn verify {out}", highlight=False
    )


@command(
    "unlearn site --out site",
    "unlearn site --out site --store runs",
    "unlearn site --out site --submissions bundles",
)
def site(
    out: Annotated[Path, typer.Option(help="A new folder, or one that this command made.")],
    submissions: Annotated[
        Path | None, typer.Option(help="Folder of bundles; each is verified first.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="A store whose suites get pages beside the others.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Write a leaderboard site of the results that come with the project and of submissions.

    Its pages load nothing from elsewhere and need no web server.
    """
    from stable_forgetting.benchmarks.sharing.site import write_site

    register_all(plugin)
    pages = write_site(out, submissions, store)
    console.print(f"{len(pages)} pages; open {out}/index.html", highlight=False)
