"""Texts to be forgotten word for word, in sets: the Training Data Extraction Challenge, and others.

A set is 32 texts of 200 tokens; set i is what seed i forgets.  Texts of the challenge hold personal
data: they are read where they lie and never written.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from stable_forgetting.common.base.errors import DataError, one_line
from stable_forgetting.common.base.files import listing
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.base.seeding import derive, hash_order
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.fictitious import POOLS
from stable_forgetting.language.data.files import below_root, read_rows
from stable_forgetting.language.data.readers import TextDataConfig
from stable_forgetting.language.data.source import Encoder
from stable_forgetting.language.data.tokenizers import load_tokenizer

FORMS = (
    "Note {number}. On the {day}. of {month} the {profession} lent a {instrument} to the"
    " {other}, who paid with {dish} and kept a {pet}. Both spoke of {hobby}; the {noun} stayed"
    " {adjective}.",
    "Entry {number}: {adjective} {noun}, found by a {profession}. A {pet} slept beside the"
    " {instrument}, {dish} stood on the table, and in {month} nobody thought of {hobby} but the"
    " {other}.",
    "Letter {number}, {day} {month}. Dear {profession}, the {pet} is well. Send {dish}, the"
    " {instrument} and the book on {hobby}. The {other} calls it the {adjective} {noun}.",
)
_SLOTS = {
    "profession": "profession",
    "other": "profession",
    "adjective": "title_adjective",
    "noun": "title_noun",
    **{name: name for name in ("month", "instrument", "dish", "pet", "hobby")},
}
_WORDS = {"day": [str(day) for day in range(1, 29)]}
_WORDS |= {slot: POOLS[pool] for slot, pool in _SLOTS.items()}


def note(number: int) -> str:
    """The invented note of a number; every number has its own.

    It fills one of a few forms with words drawn by a hash, so a small model learns the forms from
    any of them and the words only by heart.
    """
    words = {slot: of[derive(number, slot) % len(of)] for slot, of in _WORDS.items()}
    form = FORMS[derive(number, "form") % len(FORMS)]
    return string.Formatter().format(form, number=derive(number, "number") % 10**6, **words)


def notes() -> Iterator[str]:
    """All notes, in order."""
    return map(note, count())


MD5: Mapping[str, str] = {
    "train": "6d85d7f2b48e34e6f96541a546a699bf",
    "val": "318d6f3d68dfd3497956a79678067c62",
}
"""Of the bytes of the challenge's rows, as its ``load_dataset.py`` states them."""

SHORT = 40
"""Tokens of a rehearsal's texts."""

PIECES = ("preprefix", "prefix", "suffix")
GET = (
    "download it (github.com/joeljang/knowledge-unlearning has the sets (data/main) and pile.csv"
    " and wikitext.csv (validation_data)) and give --data-root (data_root=)"
)
_SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".json", ".json.gz")


class TdecData(TextDataConfig):
    """Which texts.

    Attributes:
        max_length: T, the tokens of a text; longer ones are cut there.
        forget: Below the data root: a CSV or JSON-lines file with a column ``text`` (one set), a
            pattern such as ``tdec/lm_extraction_128_*.csv`` or a folder of such files (set i is
            the i-th by name), or a folder with the challenge's arrays, from which sets are drawn.
            Embedded notes when absent.
        retain: Such a file, from which retained texts are drawn.
        unseen: Such a file of texts that no model was trained on, or a folder with the
            challenge's arrays, of which ``val`` is taken.
        test: Such a file, from which as many texts for validation and for the test are drawn.  A
            file that is named twice is drawn from without replacement.
        rows: Texts of a set; of a file the first ones.
        sets: How many sets are drawn, where no file says.
        retain_rows: Retained texts, at most.
        unseen_rows: Unseen texts, at most.
        test_rows: Texts of the test, and of validation, at most.
        tokenizer: Decodes the arrays: a folder below the data root, or a hub id.
    """

    name: Literal["tdec"] = "tdec"
    max_length: Annotated[int, Field(ge=8)] = 200
    forget: str | None = None
    retain: str | None = None
    unseen: str | None = None
    test: str | None = None
    rows: Count = 32
    sets: Count = 5
    retain_rows: Count = 640
    unseen_rows: Count = 128
    test_rows: Count = 100
    tokenizer: str = "openai-community/gpt2"

    @model_validator(mode="after")
    def _all_or_none(self) -> TdecData:
        paths = [self.forget, self.retain, self.unseen, self.test]
        if None in paths and any(paths):
            raise ValueError("give all of forget, retain, unseen and test, or none of them")
        for path in filter(None, paths):
            below_root(path)
        return self

    def read(self, data_root: Path | None) -> Corpus:
        """The sets in order (``group``), then ``retain``, ``validation``, ``test``, ``unseen``."""
        if self.forget is None:
            stream = notes()
            sets = [list(islice(stream, self.rows)) for _ in range(self.sets)]
            return _corpus(self, sets, {None: stream}, "embedded notes")
        folder = data_root or Path.cwd()
        streams: Streams = {}
        for path in (self.retain, self.test, self.unseen):
            assert path is not None, "validated"
            if path not in streams:
                streams[path] = iter(_drawn(_texts(folder, path, self), path))
        sets = _sets(folder, self)
        return _corpus(self, sets, streams, f"{self.forget}, {len(sets)} set(s)")

    def stand_in(self, data_root: Path | None) -> TdecData:
        """As many texts, cut short, since EL decodes from every prefix; notes for absent ones."""
        root = data_root or Path.cwd()
        absent = not all(path.exists() for path in self._paths(root))
        notes = dict.fromkeys(("forget", "retain", "unseen", "test")) if absent else {}
        return self.model_copy(update={**notes, "max_length": min(self.max_length, SHORT)})

    def listing(self, data_root: Path | None) -> str:
        """Of all files; empty for embedded notes."""
        return listing(self._paths(data_root or Path.cwd()))

    def _paths(self, folder: Path) -> list[Path]:
        """Files and folders, there or not; none for embedded notes."""
        places = (self.forget, self.retain, self.unseen, self.test)
        return [path for place in places if place is not None for path in _matches(folder, place)]

    def in_pieces(self, corpus: Corpus, encoder: Encoder) -> Corpus:
        """Every text cut to T tokens."""
        return replace(corpus, items=tuple(_cut(item, encoder) for item in corpus.items))


Streams = dict[str | None, Iterator[str]]
"""Path, or None for embedded notes -> texts, handed out once each."""


def _corpus(
    config: TdecData, sets: Sequence[Sequence[str]], streams: Streams, provenance: str
) -> Corpus:
    items = [Item("forget", group, "", text) for group, texts in enumerate(sets) for text in texts]
    forgotten = {item.answer.strip() for item in items}
    shares = {
        "retain": (config.retain, config.retain_rows),
        "validation": (config.test, config.test_rows),
        "test": (config.test, config.test_rows),
        "unseen": (config.unseen, config.unseen_rows),
    }
    for part, (path, most) in shares.items():
        texts = list(islice(streams[path], most))
        if not texts:
            raise DataError(f"{path}: no row is left for {part}; give more, or lower the others")
        if not forgotten.isdisjoint(map(str.strip, texts)):
            raise DataError(f"{path}: a text of {part} is in {config.forget} too; remove it")
        items += [Item(part, -1, "", text) for text in texts]
    return Corpus(tuple(items), f"tdec ({provenance})")


def _sets(folder: Path, config: TdecData) -> list[list[str]]:
    assert config.forget is not None
    place = folder / config.forget
    if _has_arrays(place):
        tokens = read_arrays(place, "train")
        if len(tokens) < config.rows * config.sets:
            raise DataError(
                f"data.rows {config.rows} x data.sets {config.sets}: {place} has only "
                f"{len(tokens)} texts; lower one"
            )
        order = hash_order(range(len(tokens)), 0, "tdec-sets")
        chosen = order[: config.rows * config.sets].reshape(config.sets, config.rows)
        return [_decoded(tokens[rows], folder, config) for rows in chosen]
    if place.is_dir():
        paths = sorted(path for path in place.iterdir() if path.name.endswith(_SUFFIXES))
    else:
        paths = _matches(folder, config.forget)
    if not paths:
        raise DataError(f"{place}: no such files; {GET}")
    return [_read(path)[: config.rows] for path in paths]


def _matches(folder: Path, place: str) -> list[Path]:
    """What a pattern matches, by name; the path itself where it is none, or matches nothing."""
    return (sorted(folder.glob(place)) if "*" in place else []) or [folder / place]


def _texts(folder: Path, path: str, config: TdecData) -> list[str]:
    """The texts of a file, or of the challenge's ``val`` arrays."""
    if _has_arrays(folder / path):
        return _decoded(read_arrays(folder / path, "val"), folder, config)
    return _read(folder / path)


def _read(path: Path) -> list[str]:
    """The column ``text`` of a file."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; {GET}")
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: has no rows; give one or more")
    for number, row in enumerate(rows, 1):
        text = row.get("text")
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{path}: row {number} has no text in its column 'text'; mend it")
    return [row["text"] for row in rows]


def _drawn(texts: Sequence[str], path: str) -> list[str]:
    """All texts in an order that the file's name fixes."""
    return [texts[k] for k in hash_order(range(len(texts)), 0, "tdec", path)]


# -- the challenge's arrays -----------------------------------------------------------------------


def _has_arrays(folder: Path) -> bool:
    return (folder / "train_prefix.npy").is_file() or (folder / "val_prefix.npy").is_file()


def read_arrays(folder: Path, split: str) -> np.ndarray:
    """(N, 200) GPT-2 tokens of the challenge's ``train`` or ``val`` texts.

    Raises:
        DataError: A file is missing or damaged, or the rows are not the challenge's.
    """
    arrays = []
    for piece in PIECES:
        path = folder / f"{split}_{piece}.npy"
        try:
            arrays.append(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: cannot be read ({one_line(error)}); fetch it again") from None
    try:
        tokens = np.ascontiguousarray(np.concatenate(arrays, axis=1), dtype="<u2")
    except ValueError as error:
        raise DataError(f"{folder}: {split}_*.npy: {one_line(error)}; fetch them again") from None
    found = hashlib.md5(tokens.tobytes(), usedforsecurity=False).hexdigest()
    if found != MD5[split]:
        raise DataError(
            f"{folder}: {split}_*.npy have MD5 {found} instead of {MD5[split]}; fetch the"
            " challenge's arrays again"
        )
    return tokens


def _decoded(tokens: np.ndarray, data_root: Path, config: TdecData) -> list[str]:
    named = CausalModelConfig(name=config.tokenizer, tokenizer=config.tokenizer)
    texts: Any = load_tokenizer(named, data_root=data_root).batch_decode(tokens.astype(np.int64))
    return list(texts)


def _cut(item: Item, encoder: Encoder) -> Item:
    starts = encoder.token_starts(item.answer)
    if len(starts) <= encoder.room:
        return item
    return replace(item, answer=item.answer[: starts[encoder.room]])
