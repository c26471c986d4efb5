"""A static site: one page per shipped report and per verified bundle, and one that lists them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import BoardRow
from stable_forgetting.benchmarks.leaderboard.data import to_json
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.picture import draw
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.settings import place_of, row_detail
from stable_forgetting.benchmarks.leaderboard.tables import READING
from stable_forgetting.benchmarks.report import html
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.report.section import Detail, Picture, Section, Table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board, read_report
from stable_forgetting.benchmarks.sharing import versus
from stable_forgetting.benchmarks.sharing.front import INDEX, ORIGINS, Page, lists
from stable_forgetting.benchmarks.sharing.verify import sections as verified_sections
from stable_forgetting.benchmarks.sharing.verify import verify_bundle
from stable_forgetting.benchmarks.sharing.versus_picture import picture
from stable_forgetting.benchmarks.suite.reading import suite_version
from stable_forgetting.benchmarks.suite.remembered import remembered
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.common.base.errors import ConfigError, UserError
from stable_forgetting.common.store.stages import StageStore

logger = logging.getLogger(__name__)


def write_site(out: Path, submissions: Path | None, store: Path | None = None) -> list[str]:
    """Writes every page; returns their names.

    Args:
        out: A new folder, or one that this function made.
        submissions: A folder of bundles.
        store: A store whose suites get pages too.

    Raises:
        ConfigError: ``out`` holds something else, or ``submissions`` is no folder.
        DataError: A submission is no bundle, or damaged; nothing is written.
    """
    if out.exists() and not (out.is_dir() and ((out / INDEX).is_file() or not any(out.iterdir()))):
        raise ConfigError(f"--out {out}: holds something else; name another folder")
    own = [*(_of_store(store) if store else ()), *(_submitted(submissions) if submissions else ())]
    pages = [*_shipped(), _versus(), *own]
    files = {
        page.file: html.write(page.sections, home=(INDEX, "All results"), note=ORIGINS[page.origin])
        for page in pages
    }
    files |= lists(pages)
    write_files(out, files)
    return [*files]


def _shipped() -> Iterator[Page]:
    for file in sorted(RESULTS.glob("*/LEADERBOARD.md")):
        report = read_report(file.read_text("utf-8"))
        data = read_board(file.parent)
        distance = data["distance"]
        rows = [
            BoardRow(row["row"], row["method"], ag_per_seed=row["ag_per_seed"])
            for row in data["rows"]
        ]
        floors = (data["floor"] or {}).get("per_seed", ())
        drawn = draw(data["suite"], distance["title"], distance["unit"], rows, floors)
        report, made = _made_how(report)
        pieces = [*_linked(report, data), Section(content=_details(data)), *made]
        place = next(n for n, section in enumerate(pieces) if isinstance(section.content, Table))
        pieces.insert(place, Section(content=drawn))
        title = report[1].text[0] if len(report) > 1 and report[1].text else ""
        current = suite_version(file.parent.name) == data["version"]
        origin = "shipped" if current else "withdrawn"
        yield Page(f"{file.parent.name}.html", title, origin, pieces, data)
    for file in sorted(RESULTS.glob("maps/*/MAP.md")):
        report = read_report(file.read_text("utf-8"))
        picture = Picture((file.parent / "map.svg").read_text("utf-8"), report[0].title)
        pieces = [*report, Section(content=picture)]
        yield Page(f"map-{file.parent.name}.html", report[0].title, "shipped", pieces, {})


def _made_how(report: Sequence[Section]) -> tuple[list[Section], list[Section]]:
    """The report without the paragraph on data and versions, and that paragraph, folded."""
    start, rest, made = "Data: ", [], []
    for section in report:
        found = [text for text in section.text if text.startswith(start)]
        made += [[Detail("made", "Data and versions", text)] for text in found]
        rest.append(replace(section, text=tuple(t for t in section.text if t not in found)))
    return rest, [Section(content=details) for details in made]


def _of_store(store: Path) -> Iterator[Page]:
    """The suites of a store that have records."""
    if not (store / "suites").is_dir():
        raise ConfigError(f"--store {store}: holds no suites; run one first")
    for folder in sorted(path for path in (store / "suites").iterdir() if path.is_dir()):
        try:
            suite = load_suite(remembered(folder.name, store))
        except UserError as error:  # of a file or plugin that is not here
            logger.warning("left out: %s: %s", folder.name, error)
            continue
        board = make_leaderboard(suite, StageStore(store))
        if board.records:
            name = re.sub(r"[^\w.+=-]+", "-", folder.name)
            title, pieces = board.suite.spec.title, sections(board)
            yield Page(f"run-{name}.html", title, "own", pieces, to_json(board))


def _versus() -> Page:
    """Rows with a bound against rows without, over all shipped tables."""
    met, withdrawn = versus.encounters(versus.CLAIMS, [RESULTS])
    title = "Does a bound help? Rows against each other, in every table that has both"
    pieces = [Section(title, depth=1), Section(content=picture(met))]
    pieces += [replace(s, depth=2) for s in versus.sections(met, withdrawn)]
    return Page("versus.html", title, "shipped", pieces, {})


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
        raise ConfigError(f"--submissions {folder}: no such folder")
    for path in sorted(p for p in folder.iterdir() if p.is_dir() or p.suffix == ".zip"):
        verification = verify_bundle(path)
        board = verification.board
        said = [replace(s, title="", depth=2) for s in verified_sections(verification)]
        origin = "differs" if verification.different else "verified"
        name = re.sub(r"[^\w.+=-]+", "-", path.stem)
        pieces = [*said, *sections(board)]
        yield Page(f"submitted-{name}.html", board.suite.spec.title, origin, pieces, to_json(board))
