"""Sections -> one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path

from stable_forgetting.benchmarks.report.section import (
    Column,
    Detail,
    Details,
    Picture,
    Section,
    Table,
)


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def write(
    sections: Sequence[Section], *, home: tuple[str, str] | None = None, note: str = ""
) -> str:
    """The whole report as one page that loads nothing.

    Args:
        sections: Of the report.
        home: Address and name of the page that lists this one.
        note: Beside the way home.
    """
    title = escape(next((section.title for section in sections if section.title), ""))
    body = fragment(sections)
    if home:
        body = (
            f'<nav><a href="{escape(home[0])}">{escape(home[1])}</a> {escape(note)}</nav>\n{body}'
        )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>{title}</title><style>{_asset('page.css')}</style></head>\n"
        f"<body>\n{body}\n<script>{_asset('page.js')}</script></body></html>\n"
    )


def fragment(sections: Sequence[Section]) -> str:
    """The body of :func:`write` alone, for a page that is there already."""
    return "\n".join(block for section in sections for block in _blocks(section))


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
        yield f'<figure class="scroll" aria-label="{escape(content.alt)}">{content.svg}</figure>'
    elif isinstance(content, Details):
        yield from map(_detail, content.items)
    if section.lines:
        yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>"


def _detail(detail: Detail) -> str:
    links = "".join(
        f'<p><a href="{escape(address)}">{escape(text)}</a></p>'
        if address
        else f"<p>{escape(text)}</p>"
        for text, address in detail.links
    )
    return (
        f'<details id="{escape(detail.place)}"><summary>{escape(detail.name)}</summary>'
        f"{links}<pre>{escape(detail.text)}</pre></details>"
    )


def _table(table: Table) -> str:
    styles = {"number": "", "words": ' class="left words"'}
    classes = [styles.get(column.kind, ' class="left"') for column in table.columns]

    def row(cells: Sequence[str]) -> str:
        pairs = zip(classes, [_first(table, cells[0]), *map(escape, cells[1:])], strict=True)
        return "".join(f"<td{style}>{cell}</td>" for style, cell in pairs)

    lines = []
    for cells in table.rows:
        mark = table.marks.get(cells[0])
        lines.append((f'<tr class="{mark}">' if mark else "<tr>") + row(cells) + "</tr>")
    heads = "".join(
        f"<th{style}{_tooltip(column)}>{escape(column.head)}</th>"
        for style, column in zip(classes, table.columns, strict=True)
    )
    head = f"<thead><tr>{heads}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _first(table: Table, cell: str) -> str:
    link = table.links.get(cell)
    return f'<a href="{escape(link)}">{escape(cell)}</a>' if link else escape(cell)


def _tooltip(column: Column) -> str:
    return f' title="{escape(column.head)} {escape(column.doc)}"' if column.doc else ""
