"""Sections -> one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

from stable_forgetting.benchmarks.report.section import (
    Answer,
    Card,
    Column,
    Detail,
    Picture,
    Sample,
    Section,
    Table,
)

MOST_ROWS = 80
"""A longer table has a height of its own, and its heads stay in sight."""


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def write(
    sections: Sequence[Section],
    *,
    home: tuple[str, str] | None = None,
    note: str = "",
    links: Sequence[tuple[str, str]] = (),
    folded: bool = False,
    refresh: int | None = None,
) -> str:
    """The whole report as one page that loads nothing.

    Args:
        home: Address and name of the page that lists this one.
        note: Beside the way home.
        links: (address, name) of files to take away, beside the note.
        folded: Whether the parts after the first are shut until a reader asks.
        refresh: Seconds after which a browser loads the page again.
    """
    title = escape(next((section.title for section in sections if section.title), ""))
    body = _folded(sections) if folded else fragment(sections)
    if home:
        away = "".join(f" · {_link(address, name)}" for address, name in links)
        body = f"<nav>{_link(*home)} {escape(note)}{away}</nav>\n{body}"
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
    told: set[str] = set()
    return "\n".join(block for section in sections for block in _blocks(section, told))


def _folded(sections: Sequence[Section]) -> str:
    """The same; each part that a heading of the second level begins is folded."""
    starts = [n for n, own in enumerate(sections) if own.title and own.depth == 2]
    parts = [fragment(sections[: starts[0]] if starts else sections)]
    for start, end in pairwise([*starts, len(sections)]):
        first, *rest = sections[start:end]
        inner = fragment([replace(first, title=""), *rest])
        head = f"<summary><h2>{escape(first.title)}</h2></summary>"
        parts.append(f'<details class="part" id="{place(first.title)}">{head}\n{inner}</details>')
    return "\n".join(parts)


def place(title: str) -> str:
    """What ``#place`` calls the section of a title."""
    return re.sub(r"\W+", "-", title.split(",")[0].lower())


def _blocks(section: Section, told: set[str]) -> Iterator[str]:
    """The parts of a section; what is in ``told`` is not explained again."""
    if section.title:
        tag, own = f"h{section.depth}", place(section.title)
        yield f'<{tag} id="{own}">{escape(section.title)}</{tag}>'
    for paragraph in filter(None, section.text):
        yield f'<p class="{section.tone}">{_prose(paragraph)}</p>'
    content = section.content
    if isinstance(content, Table):
        yield _table(content)
        if (text := content.explanation) and text not in told:
            told.add(text)
            yield f"<p>{_prose(text)}</p>"
    elif isinstance(content, Picture):
        yield _figure(content)
    elif content:
        samples = "".join(_sample(one) for one in content if isinstance(one, Sample))
        yield from (_detail(one) for one in content if isinstance(one, Detail))
        yield from (f'<div class="cards">{cards}</div>' for cards in [samples] if cards)
        beside = [_card(one) for one in content if isinstance(one, Card)]
        beside += [_figure(one) for one in content if isinstance(one, Picture)]
        yield from (f'<div class="grid">{"".join(beside)}</div>' for _ in beside[:1])
    if section.lines:
        yield "<ul>" + "".join(f"<li>{_prose(line)}</li>" for line in section.lines) + "</ul>"


def _prose(text: str) -> str:
    """Escaped text; what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _link(address: str, text: str) -> str:
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def _figure(picture: Picture) -> str:
    return f'<figure class="scroll" aria-label="{escape(picture.alt)}">{picture.svg}</figure>'


def _card(card: Card) -> str:
    text = "".join(f"<p>{_prose(paragraph)}</p>" for paragraph in card.text)
    items = "".join(f"<li>{_link(to, name)} {escape(told)}</li>" for name, to, told in card.links)
    links = f"<ul>{items}</ul>" if items else ""
    return f"<section><h3>{escape(card.title)}</h3>{text}{links}</section>"


def _detail(detail: Detail) -> str:
    links = "".join(
        f"<p>{_link(address, text) if address else escape(text)}</p>"
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
    style = "scroll tall" if len(lines) > MOST_ROWS else "scroll"
    return f'<div class="{style}"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _first(table: Table, cell: str) -> str:
    link = table.links.get(cell)
    return _link(link, cell) if link else escape(cell)


def _tooltip(column: Column) -> str:
    return f' title="{escape(column.head)} {escape(column.doc)}"' if column.doc else ""
