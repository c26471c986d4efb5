"""The pages that list a site's results: the front page, every row, and a page per method."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import info_of
from stable_forgetting.benchmarks.leaderboard.settings import place_of
from stable_forgetting.benchmarks.leaderboard.tables import MARKS, NOTES
from stable_forgetting.benchmarks.report import html
from stable_forgetting.benchmarks.report.cells import MISSING, number
from stable_forgetting.benchmarks.report.files import csv_text
from stable_forgetting.benchmarks.report.section import Card, Column, Picture, Section, Table, table
from stable_forgetting.benchmarks.sharing import heat, versus
from stable_forgetting.benchmarks.suite.suite import REFERENCES

INDEX, ROWS = "index.html", "rows.html"
HEAT = (
    "1.0 is as near to a retrained model as a second retrained model is. Rows that stand in three "
    "tables or more, the nearest first. Tables without a retrained model are left out."
)
PARETO = (
    "Of each kind the table with the most methods. Lower left is the retrained model; green is the "
    "mean distance of a second one: smaller differences mean nothing. The line joins the rows that "
    "no other beats on both sides."
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
COMPARED = ("shipped", "own", "verified")
"""Origins whose tables answer a question."""
NEWEST = 6
RATIOS = (1, 2, 5, 20)
"""Of the distance over the floor's, where the colour changes."""


@dataclass(frozen=True)
class Page:
    """One report.

    Attributes:
        origin: A key of :data:`ORIGINS`.
        data: As ``leaderboard.json`` has it; empty for a sweep.
        kind: What is forgotten from what, such as ``Images: classes``.
        files: Name -> text of files to take away.
        drawn: What is forgotten against what is kept; None where the benchmark has no two sides.
    """

    file: str
    title: str
    origin: str
    sections: Sequence[Section]
    data: Mapping[str, Any]
    kind: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    drawn: Picture | None = None


# The pages that list them -------------------------------------------------------------------------


def lists(pages: Sequence[Page], met: Sequence[versus.Encounter]) -> dict[str, str]:
    """The front page, the page of every row, and a page per method."""
    boards = sorted((page for page in pages if page.data), key=lambda p: (p.kind, size(p)))
    methods = _of_methods(boards)
    home = (INDEX, "All results")
    files = {INDEX: html.write(_index(pages, boards, methods, met))}
    every = _every([line for page in boards for line in _rows(page)], boards)
    listed = [Section("Every row", content=every, depth=1)]
    listed.append(Section("Every method", content=_listed(methods)))
    lines = [dict(zip(every.heads, row, strict=True)) for row in every.rows]
    files["rows.csv"] = csv_text([{k or "verdict": v for k, v in own.items()} for own in lines])
    files[ROWS] = html.write(listed, home=home, links=[("rows.csv", "CSV")])
    for method, own in methods.items():
        files[_method_file(method)] = html.write(_method_page(method, own), home=home)
    return files


def _index(
    pages: Sequence[Page],
    boards: Sequence[Page],
    methods: Mapping[str, Any],
    met: Sequence[versus.Encounter],
) -> list[Section]:
    others = {page.title: page.file for page in pages if not page.data}
    words = "; ".join(f"{name}: {text}" for name, text in ORIGINS.items())
    listed = table(["page"], [[title] for title in others], links=others)
    kinds = {kind: [*own] for kind, own in groupby(boards, key=lambda page: page.kind)}
    drawn = [_largest(own) for own in kinds.values()]
    return [
        Section("Machine unlearning, measured", (INTRODUCTION,), depth=1),
        Section(content=[_question(met), _choice(kinds), _newest(boards)]),
        Section("All methods, all tables", (HEAT,), content=_heat(boards, methods)),
        Section("Forgotten against kept", (PARETO,), content=[d for d in drawn if d]),
        *_suites(kinds),
        Section(text=(f"{words[0].upper()}{words[1:]}.",), tone="muted"),
        *([Section("Comparisons and sweeps", content=listed)] if others else []),
    ]


def _question(met: Sequence[versus.Encounter]) -> Card:
    """Whether a bound helps, as far as the tests of these tables say."""
    said = [
        f"{words}: {versus.answer(own)}"
        for pair, words in versus.CLAIMS.items()
        if (own := [each for each in met if each.pair == pair])
    ]
    last = "Tables that share data or models are not independent of each other."
    link = ("Every table and its test", "versus.html", "")
    return Card("Does a bound on the update help?", (*said, last), (link,))


def _choice(kinds: Mapping[str, Sequence[Page]]) -> Card:
    """What is forgotten from what -> its tables, with the sizes of their models."""
    links = []
    for kind, own in kinds.items():
        sizes = [size(page) for page in own if size(page)]
        ends = dict.fromkeys(_parameters(end(sizes)) for end in (min, max) if sizes)
        told = f", {' to '.join(ends)} parameters" if sizes else ""
        count = "1 table" if len(own) == 1 else f"{len(own)} tables"
        links.append((kind, f"#{html.place(kind)}", f"{count}{told}"))
    text = "Choose what is forgotten, then the size of the model."
    return Card(
        "Which table is mine?",
        (text,),
        (*links, ("Every row of every table, every method", ROWS, "")),
    )


def _newest(boards: Sequence[Page]) -> Card:
    recent = sorted(boards, key=lambda page: page.data.get("date", ""), reverse=True)[:NEWEST]
    links = [(_name(p), p.file, f"{p.data.get('date', '')}: {p.title}") for p in recent]
    return Card("Newest", (), tuple(links))


def size(page: Page) -> float:
    """Parameters of the suite's model; 0 where no row says it."""
    counts = (row["cost"].get("base_parameters") for row in page.data["rows"] if row["cost"])
    return max((count for count in counts if count), default=0.0)


def _parameters(count: float) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count / 1e3:.0f} k"


def _largest(pages: Sequence[Page]) -> Picture | None:
    """Of the table with the most rows that are called as their methods are."""
    drawn = [page for page in pages if page.drawn and _floor(page) and page.origin in COMPARED]
    named = {page.file: sum(r["row"] == r["method"] for r in _methods(page)) for page in drawn}
    return max(drawn, key=lambda page: named[page.file]).drawn if drawn else None


def _heat(boards: Sequence[Page], methods: Mapping[str, Any]) -> Picture:
    cells: dict[str, dict[str, heat.Cell]] = {}
    measured = [page for page in boards if _floor(page)]
    for page in measured:
        for row in _methods(page):
            cells.setdefault(row["row"], {})[_name(page)] = _cell(page, row)
    links = {_name(page): page.file for page in boards}
    links |= {row: _method_file(row) for row in cells if row in methods}
    suites = {_name(page): page.title for page in measured}
    title = "Distance to a retrained model, in units of a second retrained model's distance"
    subtitle = "every cell is a link"
    return heat.picture(cells, suites, RATIOS, links, title=title, subtitle=subtitle)


def _cell(page: Page, row: Mapping[str, Any]) -> heat.Cell:
    """A row's distance in units of the noise floor."""
    ratio = row["derived"]["ag"]["mean"] / (_floor(page) or math.nan)
    shown = f"{ratio:.1f}" if ratio < 10 else f"{min(ratio, 9999):.0f}"
    mark = MARKS[row["verdict"]["word"]] if row["verdict"] else ""
    said = f"{row['row']} in {_name(page)}: {ratio:.2f} times the floor {mark}".strip()
    return heat.Cell(ratio, shown, said, f"{page.file}#{place_of(row['row'])}")


def _name(page: Page) -> str:
    return page.file.removesuffix(".html")


def _method_file(row: str) -> str:
    return f"method-{re.sub(r'[^A-Za-z0-9_.]+', '-', row)}.html"


def _of_methods(boards: Sequence[Page]) -> dict[str, list[Page]]:
    """Row that is named as its method is -> the tables that have it."""
    found: dict[str, list[Page]] = {}
    for page in boards:
        for row in _methods(page):
            if row["row"] == row["method"]:
                found.setdefault(row["row"], []).append(page)
    return found


def _floor(page: Page) -> float | None:
    """Mean distance of a second Retrain; None where the table has none."""
    floor = page.data["floor"]
    return (floor["mean"] or None) if floor else None


def _listed(methods: Mapping[str, Sequence[Page]]) -> Table:
    """Every method, with a link to its page."""
    heads: list[str | Column] = [
        "method",
        Column("tables", doc="counts those that have it"),
        Column("source", "words"),
    ]
    rows = []
    for method, pages in sorted(methods.items()):
        info = info_of(method)
        rows.append([method, str(len(pages)), info.paper if info and info.paper else MISSING])
    return table(heads, rows, links={row[0]: _method_file(row[0]) for row in rows})


def _method_page(method: str, pages: Sequence[Page]) -> list[Section]:
    """Every table that has the method, and where the method comes from."""
    info = info_of(method)
    text = (f"Source: {info.paper}.",) if info and info.paper else ()
    lines = [line for page in pages for line in _rows(page) if line[1] == method]
    listed = _every(lines, pages, f"#{place_of(method)}")
    columns = tuple(column for column in listed.columns if column.head != "row")
    rows = tuple((row[0], *row[2:]) for row in listed.rows)
    return [Section(method, text, replace(listed, columns=columns, rows=rows), depth=1)]


def _suites(kinds: Mapping[str, Sequence[Page]]) -> list[Section]:
    """A table per kind, small models first."""
    heads: list[str | Column] = [
        "suite",
        Column("nearest", "label", "is the row of the smallest distance, without diverged seeds"),
        Column("distance", doc="is that row's, mean over seeds"),
        Column("floor", doc="is the distance of a second Retrain, mean over seeds"),
        Column("methods", doc="counts the rows beside the references"),
        Column("≠", doc="counts the rows that are shown to differ from a retrained model"),
        Column("parameters", doc="counts those of the model"),
        Column("what", "words"),
        Column("origin", "label"),
        Column("date", "label", "is that of the last record"),
    ]
    parts: list[Section] = []
    for kind, own in kinds.items():
        rows = [_suite(page) for page in own]
        links = {row[0]: page.file for row, page in zip(rows, own, strict=True)}
        parts.append(Section(kind, content=table(heads, rows, links=links)))
    return parts


def _suite(page: Page) -> list[str]:
    methods, floor = _methods(page), page.data["floor"]
    whole = [row for row in methods if not row["diverged"]]
    best = min(whole, key=lambda row: row["derived"]["ag"]["mean"], default=None)
    words = [(row["verdict"] or {}).get("word", "untested") for row in methods]
    nearest = [best["row"], number(best["derived"]["ag"]["mean"], 2)] if best else [MISSING] * 2
    second = number(floor["mean"] if floor else None, 2)
    about = [page.title, page.origin, page.data.get("date", "") or MISSING]
    told = MISSING if {*words} <= {"untested"} else str(words.count("different"))
    counts = [str(len(methods)), told, _parameters(size(page)) if size(page) else MISSING]
    return [_name(page), *nearest, second, *counts, *about]


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
            str(row["rank"]["rank"]) if row["rank"] else MISSING,
            str(len(_methods(page))),
            number(distance["mean"], 2),
            MARKS[verdict["word"]] if verdict else "",
            number(_floor(page), 2),
            MISSING if MISSING in ends else f"{ends[0]} to {ends[1]}",
            str(len(row["ag_per_seed"])),
        ]


def _every(rows: Sequence[Sequence[str]], pages: Sequence[Page], place: str = "") -> Table:
    """Rows of tables, each with a link to its table, or to a place there."""
    links = {_name(page): f"{page.file}{place}" for page in pages}
    heads: list[str | Column] = [
        "suite",
        Column("row", "label"),
        Column("rank", doc="is the place in its suite"),
        Column("of", doc="counts the suite's methods"),
        Column("distance", doc="is the mean over seeds, in the unit of the suite's page"),
        Column("", "mark"),
        Column("floor", doc="is the distance of a second Retrain"),
        Column("95 % CI", doc="is of that mean, by Student's t"),
        Column("n", doc="counts the seeds in that mean"),
    ]
    return table(heads, rows, links=links, notes=NOTES)
