"""Sections -> one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.report.section import Column, Picture, Section, Table

STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:1200px}table{border-collapse:collapse}"
    "td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}"
    ".left{text-align:left}.goal{color:#1e8449}.reference,.muted{color:#666}.warning{color:#a04000}"
)


def write(sections: Sequence[Section]) -> str:
    """The whole report as one page that loads nothing."""
    title = escape(next((section.title for section in sections if section.title), ""))
    body = "\n".join(block for section in sections for block in _blocks(section))
    return (
        f"<!doctype html><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style>\n{body}\n"
    )


def _blocks(section: Section) -> Iterator[str]:
    if section.title:
        yield f"<h{section.depth}>{escape(section.title)}</h{section.depth}>"
    for paragraph in filter(None, section.text):
        yield f'<p class="{section.tone}">{escape(paragraph)}</p>'
    content = section.content
    if isinstance(content, Table):
        yield _table(content)
        yield from (f"<p>{escape(text)}</p>" for text in [content.explanation] if text)
    elif isinstance(content, Picture):
        yield content.svg
    if section.lines:
        yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>"


def _table(table: Table) -> str:
    classes = ["" if column.kind == "number" else ' class="left"' for column in table.columns]

    def row(cells: Sequence[str]) -> str:
        pairs = zip(classes, cells, strict=True)
        return "".join(f"<td{style}>{escape(cell)}</td>" for style, cell in pairs)

    lines = []
    for cells in table.rows:
        mark = table.marks.get(cells[0])
        lines.append((f'<tr class="{mark}">' if mark else "<tr>") + row(cells) + "</tr>")
    heads = "".join(
        f"<th{style}{_tooltip(column)}>{escape(column.head)}</th>"
        for style, column in zip(classes, table.columns, strict=True)
    )
    head = f"<thead><tr>{heads}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"


def _tooltip(column: Column) -> str:
    return f' title="{escape(column.head)} {escape(column.doc)}"' if column.doc else ""
