"""MUSE: news or books to be forgotten, in the layout of muse-bench/MUSE-News and MUSE-Books.

One index space of these sets: ``fold_1`` .. ``fold_N`` (texts to be forgotten) and ``retain``, each
its texts joined by a blank line and cut into chunks; ``verbmem``, ``knowmem_forget`` and
``knowmem_retain`` with their shots (``.._icl``), ``privleak_forget`` and ``privleak_holdout``,
whole.  Folds have no text in common: fold k of ``scal`` is what split k has and split k - 1 lacks.

Source: Shi et al. 2024 (arXiv 2407.06460).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field, model_validator

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.language.data.chunks import Window, blocks, chunked, split_text
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.fictitious import REFUSAL_LINES
from stable_forgetting.language.data.muse_rows import (
    FOLDS,
    ReadSplit,
    local_folder,
    provider_of,
    rows_of,
    texts_of,
)
from stable_forgetting.language.data.readers import TextDataConfig

logger = logging.getLogger(__name__)

QUESTIONS = {
    "knowmem_forget": "forget_qa",
    "knowmem_retain": "retain_qa",
    "knowmem_forget_icl": "forget_qa_icl",
    "knowmem_retain_icl": "retain_qa_icl",
}
"""Set -> split of the config knowmem."""
SHOTS = "_icl"
Row = TypeVar("Row")


FORGET_CHUNKS, RETAIN_CHUNKS = 407, 816
"""Chunks of 2,048 tokens in News' raw/forget, counted with LLaMA-2's tokenizer (102 steps of 4, as
in the published run), and in raw/retain1, by its number of texts."""
ASKED, DECODED = 100, 3 * 4 * 128
"""Rows of each set of questions or texts; steps of decoding three of them, 32 at once, 128 each."""


class MuseData(TextDataConfig):
    """Which corpus, and how much of it.

    Attributes:
        corpus: ``news``, ``books``, or ``invented`` news (no files, no network).
        source: The files below the data root (``folder``), or the ``hub``; ``auto`` takes the
            folder where there is one.
        revision: Commit of the hub's data set; a pinned one when absent.
        folds: Requests that the forget set consists of: those of the config ``scal`` or ``sust``,
            or a number of equal parts of raw/forget, in order.  One when absent: raw/forget.
        passages: A small corpus for small models, in the place of raw: forget is the ends of the
            first so many VerbMem texts, retain the beginnings of as many texts of privleak/retain;
            PrivLeak compares the forget passages with beginnings of privleak/holdout.  Each
            passage is a text of its own.
        passage_length: Characters of a passage.
        sets: So many small corpora of passages, no row of which is in another; seed i trains on
            set i, forgets and measures it.  So seeds differ in text, and none is a tuning seed's.
        qa_pairs: Keep this many questions of forget_qa and of retain_qa, from the start.
        teach: Put the questions with their answers into the training text so many times, each time
            in another order behind the solved ones of the prompt: a model from scratch learns to
            answer in no other way.
        max_length: Tokens of a chunk, the tokenizer's start token included.  The texts of raw are
            tokenised once and cut into muse_bench's blocks, the last one filled up.
    """

    later = {"sets": 1}

    name: Literal["muse"] = "muse"
    corpus: Literal["news", "books", "invented"] = "invented"
    source: Literal["auto", "folder", "hub"] = "auto"
    revision: str | None = None
    folds: Literal["scal", "sust"] | Annotated[int, Field(ge=1)] | None = None
    passages: Count | None = None
    passage_length: Annotated[int, Field(ge=200)] = 2000
    sets: Count = 1
    qa_pairs: Count | None = None
    teach: Annotated[int, Field(ge=0)] = 0
    max_length: Window = 2048

    @model_validator(mode="after")
    def _consistent(self) -> MuseData:
        if self.passages and isinstance(self.folds, str):
            raise ValueError(
                f"folds: {self.folds} has texts of its own; give a number beside passages"
            )
        if self.sets > 1 and not (self.passages and self.qa_pairs):
            raise ValueError("sets: need data.passages and data.qa_pairs, the size of one set")
        if self.corpus == "books" and isinstance(self.folds, str):
            raise ValueError(f"folds: {self.folds} is only for corpus: news and invented")
        return self

    @property
    def requests(self) -> int:
        """How many folds there are."""
        return FOLDS if isinstance(self.folds, str) else self.folds or 1

    def read(self, data_root: Path | None) -> Corpus:
        """All sets; what is not there is named in the provenance."""
        read, origin = provider_of(self, data_root)
        read = cache(read)  # every set takes its rows from the same files
        items: list[Item] = []
        for number in range(self.sets):
            for item in _items(read, self, origin, number):
                shared = item.set.endswith(SHOTS)
                if self.sets == 1 or (shared and number == 0):
                    items.append(item)
                elif not shared:
                    items.append(replace(item, group=number))
        provenance = f"MUSE {self.corpus} ({origin}){_absent(items)}"
        return Corpus(tuple(items), provenance, REFUSAL_LINES)

    def stand_in(self, data_root: Path | None) -> MuseData:
        """Invented news; in short chunks where it is known how many the real text has."""
        there = local_folder(data_root, self.corpus) is not None and self.source != "hub"
        if self.corpus == "invented" or there:
            return self
        short = {"max_length": min(self.max_length, SHORT)} if self.corpus == "news" else {}
        return self.model_copy(update={"corpus": "invented", **short})

    def vocabulary(self, corpus: Corpus) -> Corpus:
        """Every text once, so that forgotten and held-out text come in tokens of one kind."""
        items = [i for i in corpus.items if i.set not in ("verbmem", "privleak_forget")]
        return replace(corpus, items=tuple(items))

    def in_pieces(self, corpus: Corpus, encoder: Any) -> Corpus:
        """Training text in chunks; what is measured stays whole.  A chunk keeps its set.

        The texts of raw are cut into muse_bench's blocks; passages are texts of their own.
        """
        folds = [f"fold_{number + 1}" for number in range(self.requests)]
        cut = split_text if self.passages else blocks
        pieces = chunked(corpus, encoder, sets=(*folds, "retain"), cut=cut)
        if self.sets == 1:
            return pieces
        items = [
            replace(item, group=corpus.items[item.group].group)
            if item.set in (*folds, "retain")
            else item
            for item in pieces.items
        ]
        return replace(pieces, items=tuple(items))


SHORT = 256
"""Tokens of a rehearsal's chunks."""


def of_set(corpus: Corpus, indices: np.ndarray, config: Any, seed: int) -> np.ndarray:
    """Those of the rows that the seed's set has; all of them where there is one set.

    Raises:
        DataError: There is no such set.
    """
    if config.sets == 1:
        return indices
    if seed >= config.sets:
        raise DataError(
            f"data.sets {config.sets}: no set {seed}, only 0 to {config.sets - 1}; a seed is the"
            " number of its set"
        )
    own = [index for index in indices if corpus.items[index].group == seed]
    return np.asarray(own, dtype=np.int64)


def _items(read: ReadSplit, config: MuseData, origin: str, number: int) -> list[Item]:
    """Of one set: its training text, what is measured, its questions."""
    asked = _questions(read, config, origin, number)
    if config.passages:
        pieces = _passages(read, config, origin, number)
    else:
        pieces = _raw(read, config, origin)
    forget, retain, measured = pieces
    items: list[Item] = []
    for fold, texts in enumerate(forget):
        own = asked["knowmem_forget"]  # about raw/forget, which is the first of named folds
        if isinstance(config.folds, int):
            own = _share(own, fold, len(forget))
        elif fold:
            own = []
        shots = asked["knowmem_forget_icl"]
        items += _trained(f"fold_{fold + 1}", texts, own, shots, config)
    shots = asked["knowmem_retain_icl"]
    items += _trained("retain", retain, asked["knowmem_retain"], shots, config)
    items += measured
    return items + [item for group in asked.values() for item in group]


def _absent(items: Sequence[Item]) -> str:
    sets = ("verbmem", *QUESTIONS, "privleak_forget", "privleak_holdout")
    absent = [name for name in sets if name not in {item.set for item in items}]
    if not absent:
        return ""
    logger.warning("MUSE: absent, and the metrics that need it are empty: %s", ", ".join(absent))
    return f"; absent: {', '.join(absent)}"


Pieces = tuple[list[list[str]], list[str], list[Item]]
"""Texts of each fold, retained texts, items that are measured."""


def _raw(read: ReadSplit, config: MuseData, origin: str) -> Pieces:
    """The whole corpus."""
    if isinstance(config.folds, str):
        splits = [f"forget_{number + 1}" for number in range(FOLDS)]
        forget, seen = [], set[str]()
        for split in splits:
            texts = texts_of(read, config.folds, split, origin)
            forget.append([text for text in texts if text not in seen])
            seen.update(texts)
    else:
        texts = texts_of(read, "raw", "forget", origin)
        forget = [_share(texts, number, config.requests) for number in range(config.requests)]
    measured = [
        Item("verbmem", -1, *row) for row in rows_of(read, "verbmem", "forget", "prompt", "gt")
    ]
    for split in ("forget", "holdout"):
        rows = rows_of(read, "privleak", split, "text")
        measured += [Item(f"privleak_{split}", -1, "", text) for (text,) in rows]
    return forget, texts_of(read, "raw", "retain1", origin), measured


def _passages(read: ReadSplit, config: MuseData, origin: str, number: int) -> Pieces:
    """See :attr:`MuseData.passages`."""
    count, length = config.passages or 0, config.passage_length
    verbatim = rows_of(read, "verbmem", "forget", "prompt", "gt")
    others = {split: rows_of(read, "privleak", split, "text") for split in ("retain", "holdout")}
    _check_enough("passages", count, config, min(map(len, (verbatim, *others.values()))), origin)
    own = slice(number * count, (number + 1) * count)
    verbatim, others = verbatim[own], {split: rows[own] for split, rows in others.items()}
    prompts = [prompt[-max(length - len(gt), length // 4) :] for prompt, gt in verbatim]
    prompts = [prompt.partition(" ")[2] or prompt for prompt in prompts]
    truths = [gt for _, gt in verbatim]
    texts = [f"{prompt} {gt}" for prompt, gt in zip(prompts, truths, strict=True)]
    beginnings = {
        split: [text[:length].rpartition(" ")[0] or text for (text,) in rows]
        for split, rows in others.items()
    }
    measured = [Item("verbmem", -1, *row) for row in zip(prompts, truths, strict=True)]
    measured += [Item("privleak_forget", -1, "", text) for text in texts]
    measured += [Item("privleak_holdout", -1, "", text) for text in beginnings["holdout"]]
    folds = [_share(texts, number, config.requests) for number in range(config.requests)]
    return folds, beginnings["retain"], measured


def _share(rows: Sequence[Row], number: int, count: int) -> list[Row]:
    """The ``number``-th of ``count`` equal parts, in order."""
    cuts = [round(k * len(rows) / count) for k in (number, number + 1)]
    return list(rows[slice(*cuts)])


def _check_enough(key: str, count: int, config: MuseData, there: int, origin: str) -> None:
    if there < count * config.sets:
        rows = "verbmem, privleak/retain or privleak/holdout" if key == "passages" else "knowmem"
        several = f" for {config.sets} sets" if config.sets > 1 else ""
        raise DataError(
            f"data.{key} {count}{several}: {origin} has only {there} rows of {rows}; lower it"
        )


def _questions(
    read: ReadSplit, config: MuseData, origin: str, number: int
) -> Mapping[str, list[Item]]:
    """Set -> questions; shots are kept whole."""
    sets = {}
    for name, split in QUESTIONS.items():
        rows = rows_of(read, "knowmem", split, "question", "answer")
        if config.qa_pairs and not name.endswith(SHOTS):
            if rows and config.sets > 1:
                _check_enough("qa_pairs", config.qa_pairs, config, len(rows), origin)
            rows = rows[number * config.qa_pairs : (number + 1) * config.qa_pairs]
        sets[name] = [Item(name, -1, question, answer) for question, answer in rows]
    return sets


def _trained(
    name: str,
    texts: Sequence[str],
    asked: Sequence[Item],
    shots: Sequence[Item],
    config: MuseData,
) -> list[Item]:
    """One long text (or the passages), and one of all questions each time that they are taught."""
    whole = list(texts) if config.passages else ["\n\n".join(texts)]
    for copy in range(config.teach if asked else 0):
        order = hash_order(range(len(asked)), copy, "teach", name)
        rows = [*shots, *(asked[index] for index in order)]
        whole.append("\n\n".join(f"Question: {row.question}\nAnswer: {row.answer}" for row in rows))
    return [Item(name, -1, "", text) for text in whole if text.strip()]
