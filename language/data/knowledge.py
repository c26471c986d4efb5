"""Knowledge to forget and knowledge to keep: passages, and questions about them; read or invented.

A table is a file below the data root, or one of the hub: ``hub:OWNER/NAME:CONFIG:SPLIT``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import listing
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.files import hub_rows, read_rows
from stable_forgetting.language.data.forms import Row
from stable_forgetting.language.data.readers import TextDataConfig

HUB = "hub:"
SHORTEST = 50
"""Characters that a passage must have more of, as in WMDP's code."""
FACTS = {
    "forget": (
        ("melts at", ("41 degrees", "67 degrees", "88 degrees", "93 degrees")),
        ("is kept in", ("brass jars", "cork boxes", "glass tubes", "clay pots")),
        ("is drawn from", ("fern roots", "sea moss", "elm bark", "salt rock")),
    ),
    "retain": (
        ("lies by the river", ("Arn", "Belo", "Corva", "Dusk")),
        ("is known for its", ("bells", "bridges", "kites", "lamps")),
        ("was founded by", ("weavers", "sailors", "millers", "monks")),
    ),
}
"""Set -> what is said of its subjects: compounds, and towns."""


class KnowledgeData(TextDataConfig):
    """Tables of passages and questions, or invented subjects.

    Attributes:
        invented: Subjects of each kind, in the place of all tables; there are 72 names.
    """

    invented: Annotated[int, Field(ge=1, le=72)] | None = None

    @abstractmethod
    def places(self) -> Iterable[str]:
        """All tables."""

    @abstractmethod
    def read_items(self, data_root: Path | None) -> Iterable[Item]:
        """The rows of all tables."""

    @abstractmethod
    def invent(self, count: int) -> Iterable[Item]:
        """Passages and questions about so many subjects of each kind."""

    def listing(self, data_root: Path | None) -> str:
        """Of the tables that are files."""
        files = [] if self.invented else [p for p in self.places() if not p.startswith(HUB)]
        return listing((data_root or Path.cwd()) / path for path in files)

    def read(self, data_root: Path | None) -> Corpus:
        """All tables, or invented subjects."""
        if self.invented is not None:
            return Corpus(tuple(self.invent(self.invented)), "invented compounds and towns")
        return Corpus(tuple(self.read_items(data_root)), self.name.upper())

    def stand_in(self, data_root: Path | None) -> TextDataConfig:
        """Invented subjects where a table is absent or on the hub."""
        there = all(is_there(place, data_root) for place in self.places())
        return self if there else type(self)(max_length=self.max_length, invented=12)


def read_table(place: str, data_root: Path | None) -> list[Row]:
    """Rows of a file, or of a table of the hub.

    Raises:
        DataError: There is no such table, or it cannot be read.
    """
    if not place.startswith(HUB):
        path = (data_root or Path.cwd()) / place
        if not path.is_file():
            raise DataError(f"{path}: no such file; give it, or {HUB}OWNER/NAME:CONFIG:SPLIT")
        return read_rows(path)
    repository, config, split = [*place.removeprefix(HUB).split(":"), "", ""][:3]
    instead = "give a file below the data root"
    return hub_rows(repository, config or None, split or "train", what=f"{place}:", instead=instead)


def passages_of(place: str, data_root: Path | None, names: Sequence[str]) -> list[str]:
    """The texts of a table with more than 50 characters, which drops blank lines and headings."""
    rows = read_table(place, data_root)
    found = (str(next((row[name] for name in names if row.get(name)), "")) for row in rows)
    texts = [text for text in found if len(text) > SHORTEST]
    if not texts:
        wanted = " or ".join(names)
        raise DataError(
            f"{place}: no row has {wanted} with more than {SHORTEST} characters; mend it"
        )
    return texts


def is_there(place: str, data_root: Path | None) -> bool:
    """Whether a table is a file that can be read without a network."""
    return not place.startswith(HUB) and ((data_root or Path.cwd()) / place).is_file()


def column(row: Row, names: Sequence[str], origin: str) -> str:
    """A row's text under the first of several names that it has.

    Raises:
        DataError: It has none of them, or no text there.
    """
    for name in names:
        value = row.get(name)
        if value in (None, ""):
            continue
        if not isinstance(value, str):
            raise DataError(f"{origin}: {name} {value!r} is not a text; put it in quotes")
        return value
    has = ", ".join(sorted(row))
    raise DataError(f"{origin}: needs {' or '.join(names)}; it has: {has}")


def subjects(set_name: str, count: int) -> list[str]:
    """Invented names: of compounds to forget, of towns to keep."""
    end = {"forget": ("ine", "ol"), "retain": ("ham", "wick")}[set_name]
    names = [a + b + c for a, b, c in product(("Ba", "Ke", "Lo", "Mu", "Ri", "Va"), "dlmrtv", end)]
    return [names[k] for k in hash_order(range(len(names)), 0, "names", set_name)[:count].tolist()]


def facts(set_name: str, count: int) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    """(subject, relation, values, place of the true one) of invented subjects."""
    for number, subject in enumerate(subjects(set_name, count)):
        for place, (relation, values) in enumerate(FACTS[set_name]):
            drawn = hash_order(range(len(values)), number, set_name, str(place))
            yield subject, relation, values, int(drawn[0])


def passages(set_name: str, count: int) -> list[str]:
    """One per subject: all that is known of it."""
    said: dict[str, list[str]] = {}
    for subject, relation, values, true in facts(set_name, count):
        said.setdefault(subject, []).append(f"{subject} {relation} {values[true]}.")
    return [" ".join(sentences) for sentences in said.values()]
