"""Sections -> one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path

from stable_forgetting.benchmarks.report.section import (
    Answer,
    Column,
    Detail,
    Picture,
    Sample,
    Section,
    Table,
)


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def write(
    sections: Sequence[Section],
    *,
    home: tuple[str, str] | None = None,
    note: str = "",
    refresh: int | None = None,
) -> str:
    """The whole report as one page that loads nothing.

    Args:
        sections: Of the report.
        home: Address and name of the page that lists this one.
        note: Beside the way home.
        refresh: Seconds after which a browser loads the page again.
    """
    title = escape(next((section.title for section in sections if section.title), ""))
    body = fragment(sections)
    if home:
        body = (
            f'<nav><a href="{escape(home[0])}">{escape(home[1])}</a> {escape(note)}</nav>\n{body}'
        )
    again = "" if refresh is None else f"<meta http-equiv='refresh' content='{refresh}'>"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"{again}"
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
        place = re.sub(r"\W+", "-", section.title.split(",")[0].lower())
        yield f'<h{section.depth} id="{place}">{escape(section.title)}</h{section.depth}>'
    for paragraph in filter(None, section.text):
        yield f'<p class="{section.tone}">{_prose(paragraph)}</p>'
    content = section.content
    if isinstance(content, Table):
        yield _table(content)
        yield from (f"<p>{_prose(text)}</p>" for text in [content.explanation] if text)
    elif isinstance(content, Picture):
        yield f'<figure class="scroll" aria-label="{escape(content.alt)}">{content.svg}</figure>'
    elif content:
        samples = "".join(_sample(one) for one in content if isinstance(one, Sample))
        yield from (_detail(one) for one in content if isinstance(one, Detail))
        yield from (f'<div class="cards">{cards}</div>' for cards in [samples] if cards)
    if section.lines:
        yield "<ul>" + "".join(f"<li>{_prose(line)}</li>" for line in section.lines) + "</ul>"


def _prose(text: str) -> str:
    """Escaped text; what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


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


def _sample(sample: Sample) -> str:
    data, title = base64.b64encode(sample.picture).decode(), f"#{sample.index}"
    image = f'<img alt="{title}" src="data:image/png;base64,{data}">' if sample.picture else ""
    lines = filter(None, (sample.question, f"true: {sample.truth}"))
    shown = "".join(f"<p>{escape(line)}</p>" for line in lines)
    answers = "".join(_answer(who, answer) for who, answer in sample.answers.items())
    return f"<article>{image}<h3>{title}</h3>{shown}<ul>{answers}</ul></article>"


def _answer(who: str, answer: Answer) -> str:
    words = re.split(r"(\W+)", answer.text or "(nothing)")
    text = "".join(
        f"<mark>{escape(word)}</mark>" if word.lower() in answer.recalled else escape(word)
        for word in words
    )
    return (
        f'<li class="{answer.mark}" data-who="{escape(who)}" data-known="{answer.known:.4f}">'
        f"<b>{escape(who)}</b> <span>{text}</span> <i>{100 * answer.probability:.0f} %</i></li>"
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
