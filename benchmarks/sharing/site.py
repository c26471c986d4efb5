"""A static site: one page per shipped report and per verified bundle, and one that lists them."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.data import run_lines, to_json
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.page import as_page
from stable_forgetting.benchmarks.leaderboard.picture import drawn_again
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.settings import place_of, row_detail
from stable_forgetting.benchmarks.leaderboard.tables import READING
from stable_forgetting.benchmarks.report import html, tex
from stable_forgetting.benchmarks.report.files import csv_text, write_files
from stable_forgetting.benchmarks.report.section import Detail, Picture, Section, Table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board, read_report
from stable_forgetting.benchmarks.sharing import hiding, versus
from stable_forgetting.benchmarks.sharing.front import COMPARED, INDEX, ORIGINS, Page, lists
from stable_forgetting.benchmarks.sharing.pareto import picture as pareto
from stable_forgetting.benchmarks.sharing.pareto import places, sides_of
from stable_forgetting.benchmarks.sharing.verify import sections as verified_sections
from stable_forgetting.benchmarks.sharing.verify import verify_bundle
from stable_forgetting.benchmarks.sharing.versus_picture import picture
from stable_forgetting.benchmarks.suite.reading import suite_version
from stable_forgetting.benchmarks.suite.remembered import FILE, remembered
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.common.base.errors import ConfigError, UserError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.store.stages import StageStore, check_writable

logger = logging.getLogger(__name__)
TAKEN = {"csv": "CSV", "tex": "LaTeX"}
"""End of a file that a page offers -> its format."""


def write_site(out: Path, submissions: Path | None, store: Path | None = None) -> list[str]:
    """Writes every page; returns their names.

    Args:
        out: A new folder, or one that this function made.
        submissions: A folder of bundles.
        store: A store whose suites get pages too.

    Raises:
        ConfigError: ``out`` holds something else or cannot be written, ``submissions`` is no
            folder, or two results are called alike.
        DataError: A submission is no bundle, or damaged; nothing is written.
    """
    if out.exists() and not (out.is_dir() and ((out / INDEX).is_file() or not any(out.iterdir()))):
        raise ConfigError(f"--out {out}: holds something else; name another folder")
    check_writable(out, "--out")
    own = [*(_of_store(store) if store else ()), *(_submitted(submissions) if submissions else ())]
    boards = [*_shipped(), *own]
    compared = {p.file.removesuffix(".html"): p.data for p in boards if p.origin in COMPARED}
    met, found = versus.meetings(versus.CLAIMS, compared), hiding.attacked(compared)
    pages = [*boards, *_maps(), *([_versus(met)] if met else ())]
    pages += [_hiding(found)] if found else []
    files: dict[str, str] = {}
    for page in pages:
        if page.file in files:
            raise ConfigError(f"two results would have the page {page.file}; rename one of them")
        links = [(name, TAKEN[name.rpartition(".")[2]]) for name in page.files]
        home, note = (INDEX, "All results"), ORIGINS[page.origin]
        files[page.file] = html.write(page.sections, home=home, note=note, links=links, folded=True)
        files |= page.files
    files |= lists(pages, met)
    write_files(out, files)
    return [name for name in files if name.endswith(".html")]


def _shipped() -> Iterator[Page]:
    for file in sorted(RESULTS.glob("*/LEADERBOARD.md")):
        report = read_report(file.read_text("utf-8"))
        data = read_board(file.parent)
        drawn = drawn_again(data)
        *pieces, made = as_page(_linked(report, data), data["distance"]["title"])
        details = Section("Sources, commands and settings of every row", content=_details(data))
        pieces += [*([details] if details.content else ()), made]
        place = next(n for n, section in enumerate(pieces) if isinstance(section.content, Table))
        pieces.insert(place + 1, Section(content=drawn))
        title = report[1].text[0] if len(report) > 1 and report[1].text else ""
        name = file.parent.name
        origin = "shipped" if suite_version(name) == data["version"] else "withdrawn"
        lines = (file.parent / "runs.csv").read_text("utf-8")
        files = {f"{name}.csv": lines, f"{name}.tex": tex.write(report)}
        runs = [*csv.DictReader(lines.splitlines())]
        page = Page(f"{name}.html", title, origin, pieces, data, files=files)
        yield _seen(page, load_suite(name), runs)


def _maps() -> Iterator[Page]:
    """The sweeps that come with the project; their pictures stand after the first tables."""
    for file in sorted(RESULTS.glob("maps/*/MAP.md")):
        report = read_report(file.read_text("utf-8"))
        pictures = [
            Section(content=Picture((file.parent / name).read_text("utf-8"), report[0].title))
            for name in ("map.svg", "depth.svg")
            if (file.parent / name).is_file()
        ]
        parts = [n for n, section in enumerate(report) if section.title and section.depth == 2]
        start = parts[0] if parts else len(report)
        pieces = [*report[:start], *pictures, *report[start:]]
        name = f"map-{file.parent.name}"
        files = {f"{name}.tex": tex.write(report)}
        yield Page(f"{name}.html", report[0].title, "shipped", pieces, {}, files=files)


def _seen(page: Page, suite: ResolvedSuite, runs: Sequence[Mapping[str, Any]]) -> Page:
    """The page with what is forgotten there, and the picture of both sides before its tables."""
    images = BENCHMARKS[suite.spec.benchmark].modality == "vision"
    scenario = getattr(getattr(suite.protocol, "scenario", None), "kind", "")
    what = {"class": "classes", "random": "random samples"}.get(scenario, scenario)
    kind = f"Images: {what}" if images else f"Texts: {suite.spec.benchmark.upper()}"
    sides = sides_of(suite)
    found = places(runs, sides) if sides else {}
    if sides is None or len(found) < 2:
        return replace(page, kind=kind)
    drawn = pareto(page.file.removesuffix(".html"), found, sides, page.file)
    pieces = list(page.sections)
    shown = (n for n, one in enumerate(pieces) if isinstance(one.content, Picture))
    place = next(shown, len(pieces) - 1)
    pieces.insert(place + 1, Section(content=drawn))
    return replace(page, kind=kind, drawn=drawn, sections=pieces)


def _page(board: Leaderboard, name: str, origin: str, before: Sequence[Section] = ()) -> Page:
    """A page of a report that is made here."""
    report = sections(board)
    data, title = to_json(board), board.suite.spec.title
    runs = run_lines(board)
    files = {f"{name}.csv": csv_text(runs), f"{name}.tex": tex.write(report)}
    pieces = [*before, *as_page(_linked(report, data), board.rule.title)]
    page = Page(f"{name}.html", title, origin, pieces, data, files=files)
    return _seen(page, board.suite, runs)


def _of_store(store: Path) -> Iterator[Page]:
    """The suites of a store that have records; a folder without a suite holds attacks alone."""
    if not (store / "suites").is_dir():
        raise ConfigError(f"--store {store}: holds no suites; run one first")
    for folder in sorted(file.parent for file in (store / "suites").glob(f"*/{FILE}")):
        try:
            board = make_leaderboard(load_suite(remembered(folder.name, store)), StageStore(store))
        except UserError as error:  # of a file or plugin that is not here, or of a damaged stage
            logger.warning("left out: %s: %s", folder.name, error)
            continue
        if board.records:
            yield _page(board, f"run-{_file(folder.name)}", "own")


def _file(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", name)


def _versus(met: Sequence[versus.Encounter]) -> Page:
    title = "Does a bound help? Rows against each other, in every table that has both"
    pieces = [Section(title, depth=1), Section(content=picture(met))]
    pieces += [replace(s, depth=2) for s in versus.sections(met, ())]
    return Page(
        "versus.html", title, "shipped", pieces, {}, files={"versus.csv": versus.to_csv(met)}
    )


def _hiding(found: Sequence[hiding.Attacked]) -> Page:
    pieces = hiding.sections(found)
    pieces.insert(1, Section(content=hiding.picture(found)))
    files = {"hiding.csv": hiding.to_csv(found)}
    return Page("hiding.html", hiding.TITLE, "shipped", pieces, {}, files=files)


def _linked(report: Sequence[Section], data: Mapping[str, Any]) -> list[Section]:
    """The report with links from its first table to what is said of each row."""
    labels = {row["row"] for row in _made(data)}
    pieces = list(report)
    for number_, section in enumerate(pieces):
        if isinstance(section.content, Table):
            names = {row[0]: row[0].removesuffix(READING) for row in section.content.rows}
            links = {n: f"#{place_of(label)}" for n, label in names.items() if label in labels}
            pieces[number_] = replace(section, content=replace(section.content, links=links))
            break
    return pieces


def _details(data: Mapping[str, Any]) -> list[Detail]:
    settings = data.get("settings", {})
    return [
        row_detail(data["suite"], row["row"], row["method"], settings.get(row["row"]), row["seeds"])
        for row in _made(data)
    ]


def _made(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of the suite that were run; the second Retrain belongs to the first."""
    return [row for row in data["rows"] if row["seeds"] and row["row"] != FLOOR]


def _submitted(folder: Path) -> Iterator[Page]:
    """The bundles of a folder, each made again from its scores."""
    if not folder.is_dir():
        raise ConfigError(f"--submissions {folder}: no such folder; give the one with the bundles")
    for path in sorted(p for p in folder.iterdir() if p.is_dir() or p.suffix == ".zip"):
        verification = verify_bundle(path)
        board = verification.board
        said = [replace(s, title="", depth=2) for s in verified_sections(verification)]
        origin = "differs" if verification.different else "verified"
        yield _page(board, f"submitted-{_file(path.name.removesuffix('.zip'))}", origin, said)
