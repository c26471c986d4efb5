"""Sections -> Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from stable_forgetting.benchmarks.report.section import Picture, Section, Table

_TAG = re.compile("<(?=[A-Za-z/!?])")
"""What a reader of Markdown takes for the start of HTML."""


def write(sections: Sequence[Section]) -> str:
    """The whole report as one page."""
    blocks = (block for section in sections for block in _blocks(section))
    return "\n\n".join(_TAG.sub("&lt;", block) for block in blocks) + "\n"


def _blocks(section: Section) -> Iterator[str]:
    if section.title:
        yield f"{'#' * section.depth} {section.title}"
    for paragraph in filter(None, section.text):
        yield f"**{paragraph}**" if section.tone == "warning" else paragraph
    content = section.content
    if isinstance(content, Table):
        yield table_text(content)
        yield from filter(None, [content.explanation])
    elif isinstance(content, Picture) and content.file:
        yield f"![{content.alt}]({content.file})"
    if section.lines:
        yield "\n".join(f"- {line}" for line in section.lines)


def table_text(table: Table) -> str:
    """A pipe table."""

    def line(cells: Sequence[str]) -> str:
        lines = (" ".join(cell.splitlines()) for cell in cells)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in lines) + " |"

    rules = ["---:" if column.kind == "number" else "---" for column in table.columns]
    return "\n".join([line(table.heads), f"|{'|'.join(rules)}|", *map(line, table.rows)])
