"""The pages that list a site's results: the front page, every row, and a page per method."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import info_of
from stable_forgetting.benchmarks.leaderboard.settings import place_of
from stable_forgetting.benchmarks.leaderboard.tables import MARKS, NOTES
from stable_forgetting.benchmarks.report import html
from stable_forgetting.benchmarks.report.cells import MISSING, number
from stable_forgetting.benchmarks.report.section import Column, Picture, Section, Table, table
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.sharing import heat, versus
from stable_forgetting.benchmarks.suite.suite import REFERENCES

INDEX, ROWS = "index.html", "rows.html"
HEAT = (
    "1.0 is as near to a retrained model as a second retrained model is. Rows that stand in three "
    "tables or more, the nearest first. Tables without a retrained model are left out."
)
INTRODUCTION = (
    "Every number was measured; none is copied from a paper. Rows are ordered by their distance to "
    "a model retrained without the forget set, and a second such model gives the noise floor: "
    "smaller differences mean nothing. Click a head to sort, a name to read on."
)
ORIGINS = {
    "shipped": "came with the project",
    "withdrawn": "came with the project; its suite has changed since, so it compares no methods "
    "until it is run again",
    "own": "from the store that was named",
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


# The pages that list them -------------------------------------------------------------------------


def lists(pages: Sequence[Page]) -> dict[str, str]:
    """The front page, the page of every row, and a page per method."""
    boards = [page for page in pages if page.data]
    methods = _of_methods(boards)
    home = (INDEX, "All results")
    files = {INDEX: html.write(_index(pages, methods))}
    rows = [line for page in boards for line in _rows(page)]
    links = {_name(page): page.file for page in boards}
    every = [Section("Every row", content=_every(rows, links), depth=1)]
    files[ROWS] = html.write(every, home=home)
    for method, own in methods.items():
        files[_method_file(method)] = html.write(_method_page(method, own), home=home)
    return files


def _index(pages: Sequence[Page], methods: Mapping[str, Any]) -> list[Section]:
    boards = [page for page in pages if page.data]
    others = {page.title: page.file for page in pages if not page.data}
    words = "; ".join(f"{name}: {text}" for name, text in ORIGINS.items())
    listed = table(["page"], [[title] for title in others], links=others)
    return [
        Section("Machine unlearning, measured", (INTRODUCTION,), depth=1),
        Section("Start here", content=_doors(boards)),
        Section("All methods, all tables", (HEAT,), content=_heat(boards, methods)),
        Section("Suites", content=_suites(boards)),
        Section(text=(f"{words[0].upper()}{words[1:]}.",), tone="muted"),
        *([Section("Comparisons and sweeps", content=listed)] if others else []),
    ]


def _doors(boards: Sequence[Page]) -> Table:
    """Three questions and where the answer is."""
    met, _ = versus.encounters(versus.CLAIMS[:1], [RESULTS])
    bound = f"The paper's sine against its unbounded control, {versus.tally(met)}"
    first = next((page for page in boards if page.file == "digits-class.html"), boards[0])
    rows = [
        ["Does a bound help?", bound],
        ["Which method should I use?", "A row per method and a column per table: see below."],
        ["What does one table say?", first.title],
        ["Which numbers are behind it?", "Every row of every table, to sort and filter."],
    ]
    places = ("versus.html", "#all-methods", first.file, ROWS)
    links = {row[0]: place for row, place in zip(rows, places, strict=True)}
    return table(["question", "answer"], rows, words=True, links=links)


def _heat(boards: Sequence[Page], methods: Mapping[str, Any]) -> Picture:
    cells: dict[str, dict[str, heat.Cell]] = {}
    measured = [page for page in boards if _floor(page)]
    for page in measured:
        for row in _methods(page):
            ratio = row["derived"]["ag"]["mean"] / (_floor(page) or math.nan)
            mark = MARKS[row["verdict"]["word"]] if row["verdict"] else ""
            place = f"{page.file}#{place_of(row['row'])}"
            cells.setdefault(row["row"], {})[_name(page)] = heat.Cell(ratio, mark, place)
    links = {_name(page): page.file for page in boards}
    links |= {row: _method_file(row) for row in cells if row in methods}
    titles = {_name(page): page.title for page in boards}
    return heat.picture(cells, [_name(page) for page in measured], links, titles)


def _name(page: Page) -> str:
    return page.file.removesuffix(".html")


def _method_file(row: str) -> str:
    return f"method-{re.sub(r'[^A-Za-z0-9_.]+', '-', row)}.html"


def _of_methods(boards: Sequence[Page]) -> dict[str, list[Page]]:
    """Row that is named as its method is -> the tables that have it, where they are enough."""
    found: dict[str, list[Page]] = {}
    for page in boards:
        for row in _methods(page):
            if row["row"] == row["method"]:
                found.setdefault(row["row"], []).append(page)
    least = heat.LEAST_SUITES
    return {name: own for name, own in found.items() if len([*filter(_floor, own)]) >= least}


def _floor(page: Page) -> float | None:
    """Mean distance of a second Retrain; None where the table has none."""
    floor = page.data["floor"]
    return (floor["mean"] or None) if floor else None


def _method_page(method: str, pages: Sequence[Page]) -> list[Section]:
    """Every table that has the method, and where the method comes from."""
    info = info_of(method)
    text = (f"Source: {info.paper}.",) if info and info.paper else ()
    links = {_name(page): f"{page.file}#{place_of(method)}" for page in pages}
    rows = [line for page in pages for line in _rows(page) if line[1] == method]
    return [Section(method, text, _every(rows, links), depth=1)]


def _suites(pages: Sequence[Page]) -> Table:
    rows = []
    for page in pages:
        floor, methods = page.data["floor"], _methods(page)
        best = min(methods, key=lambda row: row["derived"]["ag"]["mean"], default=None)
        near = sum((row["verdict"] or {}).get("word") == "indistinguishable" for row in methods)
        nearest = [best["row"], number(best["derived"]["ag"]["mean"], 2)] if best else [MISSING] * 2
        second = number(floor["mean"] if floor else None, 2)
        about = [_name(page), page.title, page.origin, str(len(methods))]
        rows.append([*about, second, *nearest, str(near)])
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
    return table(heads, rows, links={row[0]: f"{row[0]}.html" for row in rows})


def _methods(page: Page) -> list[Mapping[str, Any]]:
    rows = page.data["rows"]
    return [r for r in rows if r["method"] not in REFERENCES and "ag" in r["derived"]]


def _rows(page: Page) -> Iterator[list[str]]:
    for row in _methods(page):
        distance, verdict = row["derived"]["ag"], row["verdict"]
        ends = [number(distance[end], 2) for end in ("low", "high")]
        yield [
            _name(page),
            row["row"],
            str(len(row["seeds"])),
            number(distance["mean"], 2),
            MARKS[verdict["word"]] if verdict else "",
            MISSING if MISSING in ends else f"{ends[0]} to {ends[1]}",
            number(_floor(page), 2),
            str(row["rank"]["rank"]) if row["rank"] else MISSING,
            str(len(_methods(page))),
        ]


def _every(rows: Sequence[Sequence[str]], links: Mapping[str, str]) -> Table:
    heads: list[str | Column] = [
        "suite",
        Column("row", "label"),
        Column("n", doc="counts the seeds"),
        Column("distance", doc="is the mean over seeds, in the unit of the suite's page"),
        Column("", "mark"),
        Column("95 % CI", doc="is of that mean, by Student's t"),
        Column("floor", doc="is the distance of a second Retrain"),
        Column("rank", doc="is the place in its suite"),
        Column("of", doc="counts the suite's methods"),
    ]
    return table(heads, rows, links=links, notes=NOTES)
