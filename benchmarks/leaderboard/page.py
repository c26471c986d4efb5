"""A report's sections as a page shows them: the ranking first, where they come from last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stable_forgetting.benchmarks.report.section import Picture, Section, Table

MADE = "Data: "
"""How the paragraph on data, versions and machines begins."""


def as_page(report: Sequence[Section], distance: str) -> list[Section]:
    """The same sections; pictures follow the first table, and the paragraph on data is the last.

    Args:
        report: Of a suite, as it is made or as it was read.
        distance: Title of the distance, which stands beside the names in the first table.
    """
    made = [text for section in report for text in section.text if text.startswith(MADE)]
    rest = [replace(s, text=tuple(t for t in s.text if t not in made)) for s in report]
    place = next((n for n, s in enumerate(rest) if isinstance(s.content, Table)), None)
    if place is not None and isinstance(ranking := rest[place].content, Table):
        pictures = [s for s in rest[:place] if isinstance(s.content, Picture)]
        before = [s for s in rest[:place] if not isinstance(s.content, Picture)]
        first = replace(rest[place], content=_distance_first(ranking, distance))
        rest = [*before, first, *pictures, *rest[place + 1 :]]
    return [*rest, *([Section("Data and versions", tuple(made))] if made else [])]


def _distance_first(ranking: Table, title: str) -> Table:
    """The table with the distance, its mark and the rank beside the names."""
    heads = [head.rstrip(" \N{DOWNWARDS ARROW}") for head in ranking.heads]
    if title not in heads:
        return ranking
    start = heads.index(title)
    first = [0, *(n for n in range(start, len(heads)) if heads[n] in (title, "", "rank"))]
    order = [*dict.fromkeys([*first, *range(len(heads))])]
    rows = tuple(tuple(row[n] for n in order) for row in ranking.rows)
    return replace(ranking, columns=tuple(ranking.columns[n] for n in order), rows=rows)
