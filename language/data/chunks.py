"""Long texts in chunks of a fixed number of tokens: nothing is dropped, nothing is cut off."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.files import FilesData, FilesReader
from stable_forgetting.language.data.readers import TextDataConfig
from stable_forgetting.language.data.tdec import TdecData

if TYPE_CHECKING:
    from stable_forgetting.language.data.source import Encoder

_SURELY_ENOUGH = 256
"""Characters of a text that is more than one token."""

Window = Annotated[int, Field(ge=8)]


class ChunkData(FilesData):
    """Which files, and how long a chunk is.

    Attributes:
        max_length: Tokens of a chunk, the tokenizer's start token included.  The last chunk of a
            text is shorter.
    """

    absent: ClassVar[Any] = {}
    later: ClassVar[tuple[str, ...]] = ()

    name: Literal["chunks"] = "chunks"  # type: ignore[assignment]
    max_length: Window = 2048


class ChunkReader(FilesReader):
    """Reads files of plain texts and divides the long ones."""

    Config: ClassVar[type[TextDataConfig]] = ChunkData

    @classmethod
    def stand_in(cls, config: ChunkData, data_root: Path | None) -> TextDataConfig:
        """Embedded notes where a file is absent."""
        root = data_root or Path.cwd()
        there = all((root / path).is_file() for path in config.files.values())
        return config if there else TdecData(max_length=config.max_length)

    @classmethod
    def in_pieces(cls, config: ChunkData, corpus: Corpus, encoder: Encoder) -> Corpus:
        """See :func:`chunked`."""
        return chunked(corpus, encoder)


def chunked(corpus: Corpus, encoder: Encoder, sets: Collection[str] | None = None) -> Corpus:
    """The corpus with every plain text in pieces of at most ``encoder.max_length`` tokens.

    A piece is a text of its own: pieces joined are the text again.  The pieces of a text have its
    place among the texts as their ``group``, so that chunk i of a set is its i-th item.  Questions
    with answers stay as they are, and so do texts of other sets than ``sets``, where that is given.
    """
    items: list[Item] = []
    for number, item in enumerate(corpus.items):
        if item.question or (sets is not None and item.set not in sets):
            items.append(item)
            continue
        pieces = list(split_text(item.answer, encoder))
        items += [replace(item, group=number, answer=piece) for piece in pieces]
    note = f"chunks of {encoder.max_length} tokens"
    return replace(corpus, items=tuple(items), provenance=f"{corpus.provenance}, {note}")


def split_text(text: str, encoder: Encoder) -> Iterator[str]:
    """Pieces of a text that have at most ``encoder.max_length`` tokens each.

    A cut lies where a token begins.  A piece may have other tokens alone than inside the text (a
    word that is cut); where that makes it too long, its cut moves back, as it does where the rest
    would be too short to be predicted from anything.

    Raises:
        DataError: The window is too small for a character of the text.
    """
    starts, room = encoder.token_starts(text), encoder.room
    begin = first = 0
    while len(starts) - first > room or len(encoder.token_starts(text[begin:])) > room:
        last = min(first + room, len(starts) - 1)
        for cut in range(last, first, -1):
            end = starts[cut]
            whole = end > max(begin, starts[cut - 1])  # not inside a character
            if whole and _fits(text[begin:end], encoder) and _suffices(text[end:], encoder):
                break
        else:
            raise DataError(
                f"'{text[begin : begin + 40]}': no chunk fits data.max_length; raise it"
            )
        yield text[begin:end]
        begin, first = end, cut
    yield text[begin:]


def _fits(piece: str, encoder: Encoder) -> bool:
    return len(encoder.token_starts(piece)) <= encoder.room


def _suffices(rest: str, encoder: Encoder) -> bool:
    """Whether a text has a token to predict and one to predict it from."""
    beginning = rest[:_SURELY_ENOUGH]
    return len(rest) > len(beginning) or len(encoder.token_starts(beginning)) >= encoder.least
