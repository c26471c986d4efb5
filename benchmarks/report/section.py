"""What a report is made of.

A job lists its sections once.  :mod:`benchmarks.report.markdown`, :mod:`benchmarks.report.html` and
:mod:`benchmarks.report.terminal` print any list, so no format can say less than another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stable_forgetting.benchmarks.report.columns import DOCS

Kind = Literal["label", "number", "words", "mark"]
Mark = Literal["goal", "reference"]
Tone = Literal["plain", "muted", "warning"]
Level = Literal["compact", "full"]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        kind: Labels and words are aligned left, numbers right; words may wrap.  Marks belong to
            the column before them.
        doc: What the column shows, as the rest of a sentence that begins with the head.
    """

    head: str
    kind: Kind = "number"
    doc: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under heads.

    Attributes:
        columns: The columns; the first one names the rows.
        narrow: The same rows in fewer columns, for a terminal that is too narrow for all.
        marks: First cell of a row -> how the row stands out.
        brief: What a terminal shows in its place.
        notes: Cell of a column of marks -> what it means.
        links: First cell of a row -> where more of it is said: an address, or ``#place``.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    narrow: Table | None = None
    marks: Mapping[str, Mark] = field(default_factory=dict)
    brief: Table | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def heads(self) -> list[str]:
        """The heads of the columns."""
        return [column.head for column in self.columns]

    @property
    def explanation(self) -> str:
        """One sentence on the columns that carry a doc, and on marks; empty without any."""
        docs = [f"`{column.head}` {column.doc}" for column in self.columns if column.doc]
        docs += [f"{mark} {meaning}" for mark, meaning in self.notes.items()]
        return "; ".join(docs) + "." if docs else ""


def table(
    heads: Sequence[str | Column],
    rows: Sequence[Sequence[str]],
    *,
    words: bool = False,
    **more: Any,
) -> Table:
    """A table from plain heads: a column of labels, then numbers, or words throughout.

    A plain head over numbers that :mod:`benchmarks.report.columns` knows is explained; ``more`` are
    the further attributes of the table.
    """
    docs: Mapping[str, str] = {} if words else DOCS
    columns = []
    for index, head in enumerate(heads):
        kind: Kind = "words" if words else "number" if index else "label"
        columns.append(Column(head, kind, docs.get(head, "")) if isinstance(head, str) else head)
    return Table(tuple(columns), tuple(tuple(row) for row in rows), **more)


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        alt: What it shows, for those who cannot see it.
        file: Its name beside the report, for formats that link pictures; those without a name are
            shown only where a picture can be embedded.
    """

    svg: str
    alt: str
    file: str = ""

    def _repr_html_(self) -> str:
        """The picture as a notebook shows it."""
        return self.svg


@dataclass(frozen=True)
class Detail:
    """More about one thing, folded away until a reader of a page asks.

    Attributes:
        place: What ``#place`` leads to; unique on a page.
        text: As it stands, in lines.
        links: (text, address), the address empty where none is known.
    """

    place: str
    name: str
    text: str
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What one model says to a sample.

    Attributes:
        text: Its answer: the most probable class, or its greedy text.
        probability: Of a class, that of the answer; of a text, that of the true answer's tokens
            (mean).
        known: Probability of the true answer, in [0, 1].
        mark: ``same`` as the retrained model's answer, ``other``, or empty for a reference.
        recalled: Words of the answer that stand out.
    """

    text: str
    probability: float
    known: float
    mark: str = ""
    recalled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sample:
    """One sample and what each model says to it.

    Attributes:
        index: In the data source.
        question: Of a text; empty for an image.
        truth: The true class or text.
        answers: Row label -> its answer.
        picture: A PNG file; empty for a text.
    """

    index: int
    question: str
    truth: str
    answers: Mapping[str, Answer]
    picture: bytes = b""


@dataclass(frozen=True)
class Card:
    """One of several things to begin with.

    Attributes:
        links: (text, address, what is said beside it).
    """

    title: str
    text: tuple[str, ...] = ()
    links: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Section:
    """One thing that a report says.

    Attributes:
        title: Heading; empty where the section continues the one before.
        content: Table, picture, details, samples, cards or pictures, below the text; only a page
            shows what is a sequence.
        lines: List below both.
        level: ``compact`` sections are shown on a terminal too, ``full`` ones in files alone.
        depth: Depth of the heading, 1 for the report's own.
        tone: ``muted`` for explanations, ``warning`` for what a reader must not miss.
    """

    title: str = ""
    text: tuple[str, ...] = ()
    content: Table | Picture | Sequence[Detail | Sample | Card | Picture] | None = None
    lines: tuple[str, ...] = ()
    level: Level = "compact"
    depth: int = 2
    tone: Tone = "plain"


def filled(*sections: Section) -> list[Section]:
    """The sections that say something: those with a title, a content, lines or a paragraph."""
    return [s for s in sections if s.title or s.content or s.lines or any(s.text)]
