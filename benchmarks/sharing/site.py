"""A static site: one page per shipped report and per verified bundle, and one that lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.leaderboard.data import to_json
from stable_forgetting.benchmarks.leaderboard.picture import Dots, draw
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.settings import place_of, row_detail
from stable_forgetting.benchmarks.leaderboard.tables import MARKS, NOTES
from stable_forgetting.benchmarks.report import html
from stable_forgetting.benchmarks.report.cells import MISSING, number
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.report.section import (
    Column,
    Details,
    Picture,
    Section,
    Table,
    table,
)
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board, read_report
from stable_forgetting.benchmarks.sharing import versus
from stable_forgetting.benchmarks.sharing.verify import sections as verified_sections
from stable_forgetting.benchmarks.sharing.verify import verify_bundle
from stable_forgetting.benchmarks.sharing.versus_picture import picture
from stable_forgetting.benchmarks.suite.reading import suite_version
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES
from stable_forgetting.common.base.errors import ConfigError

INDEX = "index.html"
INTRODUCTION = (
    "Every number was measured; none is copied from a paper. Rows are ordered by their distance to "
    "a model retrained without the forget set, and a second such model gives the noise floor: "
    "smaller differences mean nothing. Click a head to sort, a name to read on."
)
ORIGINS = {
    "shipped": "came with the project",
    "withdrawn": "came with the project; its suite has changed since, so it compares no methods "
    "until it is run again",
    "verified": "submitted; the table was made again from the submitted scores, and agrees",
    "differs": "submitted; the table made again from the submitted scores is another one",
}
"""Where a page's numbers come from -> in words."""


@dataclass(frozen=True)
class Page:
    """One report.

    Attributes:
        file: Its name in the site.
        origin: A key of :data:`ORIGINS`.
        data: As ``leaderboard.json`` has it; empty for a sweep.
    """

    file: str
    title: str
    origin: str
    sections: Sequence[Section]
    data: Mapping[str, Any]


def write_site(out: Path, submissions: Path | None) -> list[str]:
    """Writes every page; returns their names.

    Raises:
        ConfigError: ``out`` holds something else, or ``submissions`` is no folder.
        DataError: A submission is no bundle, or damaged; nothing is written.
    """
    if out.exists() and not (out.is_dir() and ((out / INDEX).is_file() or not any(out.iterdir()))):
        raise ConfigError(f"--out {out}: holds something else; name another folder")
    pages = [*_shipped(), _versus(), *(_submitted(submissions) if submissions else ())]
    files = {
        page.file: html.write(page.sections, home=(INDEX, "All results"), note=ORIGINS[page.origin])
        for page in pages
    }
    files[INDEX] = html.write(_index(pages))
    write_files(out, files)
    return [*files]


def _shipped() -> Iterator[Page]:
    for file in sorted(RESULTS.glob("*/LEADERBOARD.md")):
        report = read_report(file.read_text("utf-8"))
        data = read_board(file.parent)
        distance = data["distance"]
        rows = [Dots(row["row"], row["method"], row["ag_per_seed"]) for row in data["rows"]]
        floors = (data["floor"] or {}).get("per_seed", ())
        drawn = draw(data["suite"], distance["title"], distance["unit"], rows, floors)
        pieces = [*_linked(report, data), Section(content=_details(data))]
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
            names = {row[0]: row[0].removesuffix(" (our reading)") for row in section.content.rows}
            links = {n: f"#{place_of(label)}" for n, label in names.items() if label in labels}
            pieces[number_] = replace(section, content=replace(section.content, links=links))
            break
    return pieces


def _details(data: Mapping[str, Any]) -> Details:
    settings = data.get("settings", {})
    return Details(
        tuple(
            row_detail(
                data["suite"], row["row"], row["method"], settings.get(row["row"]), row["seeds"]
            )
            for row in _made(data)
        )
    )


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


# The page that lists them ------------------------------------------------------------------------


def _index(pages: Sequence[Page]) -> list[Section]:
    boards = [page for page in pages if page.data]
    others = [page for page in pages if not page.data]
    every = [line for page in boards for line in _rows(page)]
    words = "; ".join(f"{name}: {text}" for name, text in ORIGINS.items())
    result = [
        Section("Machine unlearning, measured", (INTRODUCTION,), depth=1),
        Section("Suites", content=_suites(boards)),
        Section(text=(f"{words[0].upper()}{words[1:]}.",), tone="muted"),
        Section("Every row", content=_every(every, boards)),
    ]
    if others:
        links = {page.title: page.file for page in others}
        content = table(["page"], [[page.title] for page in others])
        result.append(Section("Comparisons and sweeps", content=replace(content, links=links)))
    return result


def _suites(pages: Sequence[Page]) -> Table:
    rows = []
    for page in pages:
        floor, methods = page.data["floor"], _methods(page)
        best = min(methods, key=lambda row: row["derived"]["ag"]["mean"], default=None)
        near = sum((row["verdict"] or {}).get("word") == "indistinguishable" for row in methods)
        rows.append(
            [
                page.file.removesuffix(".html"),
                page.title,
                page.origin,
                str(len(methods)),
                number(floor["mean"] if floor else None, 2),
                best["row"] if best else MISSING,
                number(best["derived"]["ag"]["mean"] if best else None, 2),
                str(near),
            ]
        )
    heads: list[str | Column] = [
        "suite",
        Column("what", "words"),
        Column("origin", "label"),
        Column("methods", doc="counts the rows beside the references"),
        Column("floor", doc="is the distance of a second Retrain, mean over seeds"),
        Column("nearest", "label", "is the row of the smallest distance"),
        Column("distance", doc="is that row's, mean over seeds"),
        Column("indistinguishable", doc="counts the rows that are, from a retrained model"),
    ]
    return replace(table(heads, rows), links={row[0]: f"{row[0]}.html" for row in rows})


def _methods(page: Page) -> list[Mapping[str, Any]]:
    rows = page.data["rows"]
    return [r for r in rows if r["method"] not in REFERENCES and "ag" in r["derived"]]


def _rows(page: Page) -> Iterator[list[str]]:
    for row in _methods(page):
        distance, verdict = row["derived"]["ag"], row["verdict"]
        ends = [number(distance[end], 2) for end in ("low", "high")]
        yield [
            page.file.removesuffix(".html"),
            row["row"],
            str(len(row["seeds"])),
            number(distance["mean"], 2),
            MARKS[verdict["word"]] if verdict else "",
            MISSING if MISSING in ends else f"{ends[0]} to {ends[1]}",
            str(row["rank"]["rank"]) if row["rank"] else MISSING,
        ]


def _every(rows: Sequence[Sequence[str]], pages: Sequence[Page]) -> Table:
    heads: list[str | Column] = [
        "suite",
        Column("row", "label"),
        Column("n", doc="counts the seeds"),
        Column("distance", doc="is the mean over seeds, in the unit of the suite's page"),
        Column("", "mark"),
        Column("95 % CI", doc="is of that mean, by Student's t"),
        Column("rank", doc="is the place in its suite"),
    ]
    links = {page.file.removesuffix(".html"): page.file for page in pages}
    return replace(table(heads, rows), links=links, notes=NOTES)
