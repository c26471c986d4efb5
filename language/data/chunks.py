"""Long texts in chunks of a fixed number of tokens: nothing is dropped, nothing is cut off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.files import FilesData
from stable_forgetting.language.data.readers import TextDataConfig
from stable_forgetting.language.data.source import Encoder
from stable_forgetting.language.data.tdec import TdecData

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
    later: ClassVar[Any] = {}

    name: Literal["chunks"] = "chunks"  # type: ignore[assignment]
    max_length: Window = 2048

    def stand_in(self, data_root: Path | None) -> TextDataConfig:
        """Embedded notes where a file is absent."""
        root = data_root or Path.cwd()
        there = all((root / path).is_file() for path in self.files.values())
        return self if there else TdecData(max_length=self.max_length)

    def in_pieces(self, corpus: Corpus, encoder: Encoder) -> Corpus:
        """See :func:`chunked`."""
        return chunked(corpus, encoder)


def split_text(text: str, encoder: Encoder) -> Iterator[str]:
    """Pieces of a text that have at most ``encoder.max_length`` tokens each; each is a text alone.

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


def blocks(text: str, encoder: Encoder) -> Iterator[str]:
    """Blocks of exactly ``encoder.max_length`` tokens, of one tokenisation of the whole text.

    As in muse_bench (baselines/dataset.py, ``DefaultDataset`` of a text file): each block is the
    start token and the next tokens, and the last one is filled up with the first block, whose start
    token comes along.  The encoder is given the ids of each.  A text that fits into one block stays
    a text alone: muse_bench would repeat it.

    Raises:
        DataError: Two blocks have one text in different tokens.
    """
    ids, starts = encoder.located(text)
    start = encoder.text("")[:1]
    room = encoder.max_length - len(start)
    if len(ids) <= room:
        yield text
        return
    cuts = [0, *starts[room::room], len(text)]
    for number, (begin, end) in enumerate(pairwise(cuts)):
        piece, own = text[begin:end], ids[number * room : (number + 1) * room]
        missing = room - len(own)
        if missing:
            own = [*own, *[*start, *ids][:missing]]
            piece += text[: starts[max(missing - len(start), 0)]]
        if encoder.given.setdefault(piece, [*start, *own]) != [*start, *own]:
            raise DataError(f"'{piece[:40]}': two chunks have this text; change data.max_length")
        yield piece


def chunked(
    corpus: Corpus,
    encoder: Encoder,
    sets: Collection[str] | None = None,
    cut: Callable[[str, Encoder], Iterator[str]] = split_text,
) -> Corpus:
    """The corpus with every plain text in pieces of at most ``encoder.max_length`` tokens.

    The pieces of a text have its place among the texts as their ``group``, so that chunk i of a set
    is its i-th item.  Questions with answers stay as they are, and so do texts of other sets than
    ``sets``, where that is given.  ``cut`` is :func:`split_text` or :func:`blocks`.
    """
    items: list[Item] = []
    for number, item in enumerate(corpus.items):
        if item.question or (sets is not None and item.set not in sets):
            items.append(item)
            continue
        items += [replace(item, group=number, answer=piece) for piece in cut(item.answer, encoder)]
    note = f"chunks of {encoder.max_length} tokens"
    return replace(corpus, items=tuple(items), provenance=f"{corpus.provenance}, {note}")


def _fits(piece: str, encoder: Encoder) -> bool:
    return len(encoder.token_starts(piece)) <= encoder.room


def _suffices(rest: str, encoder: Encoder) -> bool:
    """Whether a text has a token to predict and one to predict it from."""
    beginning = rest[:_SURELY_ENOUGH]
    return len(rest) > len(beginning) or len(encoder.token_starts(beginning)) >= encoder.least
