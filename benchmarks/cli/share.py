"""The commands on results that come and go: ``compare``, ``submit`` and ``site``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    Plugins,
    Selection,
    Store,
    check_format,
    console,
    no_records,
    register_all,
)
from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.report.files import WRITERS
from stable_forgetting.benchmarks.report.section import Picture, Section
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.sharing import compare as comparing
from stable_forgetting.benchmarks.sharing import hiding, versus
from stable_forgetting.benchmarks.sharing.bundle import write_bundle
from stable_forgetting.benchmarks.sharing.site import write_site
from stable_forgetting.benchmarks.sharing.versus_picture import picture
from stable_forgetting.common.base import hub
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.stages import StageStore

GIVEN = (
    "Two results: each a suite, STORE:SUITE, file of records, bundle, or folder of results. Or "
    "pairs of rows: FIRST,SECOND. Default: rows with and without a bound."
)


@command(
    "unlearn compare digits-class+85a134 digits-class",
    "unlearn compare runs:digits-class theirs/runs:digits-class",
    "unlearn compare digits-class their-records.jsonl --format csv",
    "unlearn compare",
    "unlearn compare gd_sine,gd_lora gd_ball,gd_lora --filter tofu",
    "unlearn compare gd_ul_tanh_tight,gd_ul --format svg > bound.svg",
    "unlearn compare --after-attack",
)
def compare(
    selection: Selection,
    what: Annotated[list[str] | None, typer.Argument(help=GIVEN)] = None,
    words: Annotated[
        str,
        typer.Option("--filter", help="Of pairs: only suites with all these words in their name."),
    ] = "",
    store: Store = STORE,
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="table, md, tex, html, csv (every metric); of pairs also svg."
        ),
    ] = "table",
    after_attack: Annotated[
        bool,
        typer.Option(
            "--after-attack",
            help="All rows of all attacked tables instead: who forgets, who hides.",
        ),
    ] = False,
) -> None:
    """Compare two results, or two rows in every table that has both, shipped or in the store.

    Results are paired by row, seed and split. Rows are paired by seed: their distances to Retrain
    (or to the goals). Both print differences with 95 % CIs. p is corrected for the rows or the
    tables.
    """
    given = what or []
    if after_attack:
        if given or selection != Selection(plugin=selection.plugin):
            raise ConfigError("compare --after-attack: takes no results and no rows; give --filter")
        _compare_after(words, store, format_)
        return
    pairs = [name for name in given if "," in name]
    if len(pairs) == len(given):
        if selection != Selection(plugin=selection.plugin):
            raise ConfigError("compare FIRST,SECOND: --set, --seeds and --only are of two results")
        _compare_rows(pairs, words, store, format_)
    elif pairs or len(given) != 2:
        raise ConfigError("compare: give two results, or pairs of rows as FIRST,SECOND")
    elif words:
        raise ConfigError("compare --filter: only pairs of rows have it (FIRST,SECOND)")
    else:
        _compare_results(given[0], given[1], selection, store, format_)


def _compare_results(first: str, second: str, selection: Selection, store: Path, form: str) -> None:
    check_format(form, "table", "csv", *WRITERS)

    def board(suite: str, own: Path | None) -> Leaderboard | None:
        return read_board(selection, suite, own or store)

    one, other = comparing.read_results(first, board), comparing.read_results(second, board)
    differences, unpaired = comparing.compare(one, other)
    told = comparing.sections(one, other, differences, unpaired)
    _put(form, told, partial(comparing.to_csv, one, other, differences))


def _compare_rows(pairs: Sequence[str], words: str, store: Path, form: str) -> None:
    check_format(form, "table", "csv", "svg", *WRITERS)
    asked = [_two(pair) for pair in pairs] or versus.CLAIMS
    boards, withdrawn = versus.read_boards([RESULTS, store / "suites"], words)
    met = versus.meetings(asked, boards)
    told = versus.sections(met, withdrawn)
    _put(form, told, partial(versus.to_csv, met), partial(picture, met))


def _compare_after(words: str, store: Path, form: str) -> None:
    check_format(form, "table", "csv", "svg", *WRITERS)
    found = hiding.attacked(versus.read_boards([RESULTS, store / "suites"], words)[0])
    if not found:
        raise ConfigError(
            "compare --after-attack: no table has attacked rows beside a second Retrain; run a "
            "suite with audits:, such as digits-class-attack"
        )
    drawn = partial(hiding.picture, found)
    _put(form, hiding.sections(found), partial(hiding.to_csv, found), drawn)


def _two(pair: str) -> tuple[str, str]:
    names = [name.strip() for name in pair.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise ConfigError(f"compare {pair}: write two different rows as FIRST,SECOND")
    return names[0], names[1]


def _put(
    form: str,
    sections: Sequence[Section],
    to_csv: Callable[[], str],
    draw: Callable[[], Picture] | None = None,
) -> None:
    """Prints sections, or writes them in a format; a page has the picture as well."""
    if form == "table":
        show(console, sections)
    elif form == "csv":
        sys.stdout.write(to_csv())
    elif form == "svg" and draw:
        sys.stdout.write(draw().svg)
    else:
        drawn = [Section(content=draw())] if form == "html" and draw else []
        sys.stdout.write(WRITERS[form]([*sections, *drawn]))


def read_board(selection: Selection, suite: str, store: Path) -> Leaderboard | None:
    """The leaderboard of a store; None where it has no record of the suite."""
    board = make_leaderboard(selection.suite(suite, store), StageStore(store))
    return board if board.records else None


@command("unlearn submit digits-class --out digits.zip", "unlearn submit mine.yaml --out bundle")
def submit(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    out: Annotated[Path, typer.Option(help="A new folder, or a new file called *.zip.")],
    selection: Selection,
    store: Store = STORE,
    push: Annotated[
        str | None,
        typer.Option(help="Also upload the folder to the hub, as a data set OWNER/NAME."),
    ] = None,
) -> None:
    """Write a bundle of records and scores from which others recompute a suite's table.

    It holds configs, digests, numbers per sample and the environment. It holds no text, image or
    weight.
    """
    if push and out.suffix == ".zip":
        raise ConfigError(f"--push uploads a folder, and {out} is a file; give --out FOLDER")
    if push:
        hub.check_push(push)
    board = read_board(selection, suite, store)
    if board is None:
        raise ConfigError(no_records(suite, store, selection.command(suite, store)))
    count = write_bundle(board, StageStore(store), out)
    command = f"unlearn verify {shlex.quote(str(out))}"
    console.print(f"{out}: {count} files; check it anywhere with: {command}", markup=False)
    if push:
        console.print(f"uploaded: {hub.push(out, push, 'dataset')}", markup=False)


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
    register_all(plugin)
    pages = write_site(out, submissions, store)
    console.print(f"{len(pages)} pages; open {out}/index.html")
