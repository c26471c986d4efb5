"""MUSE: news or books to be forgotten, in the layout of muse-bench/MUSE-News and MUSE-Books.

One index space of these sets: ``fold_1`` .. ``fold_N`` (texts to be forgotten) and ``retain``, each
its texts joined by a blank line and cut into chunks; ``verbmem``, ``knowmem_forget`` and
``knowmem_retain`` with their shots (``.._icl``), ``privleak_forget`` and ``privleak_holdout``,
whole.  Folds have no text in common: fold k of ``scal`` is what split k has and split k - 1 lacks.

Source: Shi et al. 2024 (arXiv 2407.06460).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from common.base.errors import DataError, one_line
from common.base.hub import prepare_client
from common.base.numbers import Count
from common.base.seeding import hash_order
from language.data.articles import invented
from language.data.chunks import Window, chunked
from language.data.corpus import Corpus, Item
from language.data.files import read_values
from language.data.readers import Reader, TextDataConfig
from language.data.wording import REFUSAL_LINES

logger = logging.getLogger(__name__)

REPOSITORIES = {"news": "muse-bench/MUSE-News", "books": "muse-bench/MUSE-Books"}
REVISIONS = {
    "news": "506bd5b150b92814d45e4404a82f120ab2d748bf",
    "books": "051ba90319e920d410d87cfdbd61f25843c1b892",
}
"""Commits of the hub's data sets; earlier ones call splits otherwise."""

QUESTIONS = {
    "knowmem_forget": "forget_qa",
    "knowmem_retain": "retain_qa",
    "knowmem_forget_icl": "forget_qa_icl",
    "knowmem_retain_icl": "retain_qa_icl",
}
"""Set -> split of the config knowmem."""
SHOTS = "_icl"
FOLDS = 4
"""Splits of the configs scal and sust."""
_SUFFIXES = (".json", ".json.gz", ".jsonl", "-00000-of-00001.parquet", ".parquet")
Row = TypeVar("Row")
ReadSplit = Callable[[str, str], list[Any] | None]
"""(config, split) -> rows, None where they are not there."""


FORGET_CHUNKS, RETAIN_CHUNKS = 408, 816
"""Chunks of 2,048 tokens in News' raw/forget, by the published run's steps, and in raw/retain1, by
its number of texts."""
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
        qa_pairs: Keep this many questions of forget_qa and of retain_qa, from the start.
        teach: Put the questions with their answers into the training text so many times, each time
            in another order behind the solved ones of the prompt: a model from scratch learns to
            answer in no other way.
        max_length: Tokens of a chunk, the tokenizer's start token included.
    """

    name: Literal["muse"] = "muse"
    corpus: Literal["news", "books", "invented"] = "invented"
    source: Literal["auto", "folder", "hub"] = "auto"
    revision: str | None = None
    folds: Literal["scal", "sust"] | Annotated[int, Field(ge=1)] | None = None
    passages: Count | None = None
    passage_length: Annotated[int, Field(ge=200)] = 2000
    qa_pairs: Count | None = None
    teach: Annotated[int, Field(ge=0)] = 0
    max_length: Window = 2048

    @model_validator(mode="after")
    def _consistent(self) -> MuseData:
        if self.passages and isinstance(self.folds, str):
            raise ValueError(
                f"folds: {self.folds} has texts of its own; give a number beside passages"
            )
        if self.corpus == "books" and isinstance(self.folds, str):
            raise ValueError(f"folds: {self.folds} is only for corpus: news and invented")
        return self

    @property
    def requests(self) -> int:
        """How many folds there are."""
        return FOLDS if isinstance(self.folds, str) else self.folds or 1


SHORT = 256
"""Tokens of a rehearsal's chunks."""


class MuseReader(Reader):
    """Reads ``muse/news/``, ``muse-bench/MUSE-News/`` or the hub; books likewise."""

    Config: ClassVar[type[TextDataConfig]] = MuseData

    @classmethod
    def read(cls, config: MuseData, data_root: Path | None) -> Corpus:
        """All sets; what is not there is named in the provenance."""
        read, origin = _provider(config, data_root)
        asked = _questions(read, config)
        pieces = _passages(read, config, origin) if config.passages else _raw(read, config, origin)
        forget, retain, measured = pieces
        items: list[Item] = []
        for number, texts in enumerate(forget):
            own = asked["knowmem_forget"]  # about raw/forget, which is the first of named folds
            if isinstance(config.folds, int):
                own = _share(own, number, len(forget))
            elif number:
                own = []
            shots = asked["knowmem_forget_icl"]
            items += _trained(f"fold_{number + 1}", texts, own, shots, config)
        shots = asked["knowmem_retain_icl"]
        items += _trained("retain", retain, asked["knowmem_retain"], shots, config)
        items += measured
        items += [item for group in asked.values() for item in group]
        provenance = f"MUSE {config.corpus} ({origin}){_absent(items)}"
        return Corpus(tuple(items), provenance, REFUSAL_LINES)

    @classmethod
    def stand_in(cls, config: MuseData, data_root: Path | None) -> MuseData:
        """Invented news; in short chunks where it is known how many the real text has."""
        if config.corpus == "invented" or _folder(data_root, config.corpus) is not None:
            return config
        short = {"max_length": min(config.max_length, SHORT)} if config.corpus == "news" else {}
        return config.model_copy(update={"corpus": "invented", **short})

    @classmethod
    def vocabulary(cls, config: MuseData, corpus: Corpus) -> Corpus:
        """Every text once, so that forgotten and held-out text come in tokens of one kind."""
        items = [i for i in corpus.items if i.set not in ("verbmem", "privleak_forget")]
        return replace(corpus, items=tuple(items))

    @classmethod
    def in_pieces(cls, config: MuseData, corpus: Corpus, encoder: Any) -> Corpus:
        """Training text in chunks; what is measured stays whole."""
        folds = [f"fold_{number + 1}" for number in range(config.requests)]
        return chunked(corpus, encoder, sets=(*folds, "retain"))


def _absent(items: Sequence[Item]) -> str:
    sets = ("verbmem", *QUESTIONS, "privleak_forget", "privleak_holdout")
    absent = [name for name in sets if name not in {item.set for item in items}]
    if not absent:
        return ""
    logger.warning("MUSE: absent, and the metrics that need it are empty: %s", ", ".join(absent))
    return f"; absent: {', '.join(absent)}"


# -- where rows come from -------------------------------------------------------------------------


def _provider(config: MuseData, data_root: Path | None) -> tuple[ReadSplit, str]:
    """How splits are read, and from where."""
    if config.corpus == "invented":
        rows = invented()
        return lambda name, split: rows.get((name, split)), "generated"
    repository = REPOSITORIES[config.corpus]
    folder = _folder(data_root, config.corpus)
    if folder is not None and config.source != "hub":
        return lambda name, split: _read_local(folder / name, split), "local files"
    if config.source == "folder":
        raise DataError(
            f"muse: no muse/{config.corpus} in {data_root or 'any folder'}; give --data-root DIR"
            f" with muse/{config.corpus}/knowmem, verbmem, privleak and raw"
        )
    revision = config.revision or REVISIONS[config.corpus]
    return lambda name, split: _read_hub(repository, revision, name, split), repository


def _folder(data_root: Path | None, corpus: str) -> Path | None:
    if data_root is None:
        return None
    places = (data_root / "muse" / corpus, data_root / REPOSITORIES[corpus], data_root / corpus)
    return next((place for place in places if place.is_dir()), None)


def _read_local(folder: Path, split: str) -> list[Any] | None:
    paths = (folder / f"{split}{suffix}" for suffix in _SUFFIXES)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    if path.suffix != ".parquet":
        return read_values(path)
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow raises types of its own
        raise DataError(f"{path}: is not parquet ({one_line(error)}); fetch it again") from None


def _read_hub(repository: str, revision: str, name: str, split: str) -> list[Any] | None:
    import datasets

    prepare_client()
    try:
        table = datasets.load_dataset(repository, name, split=split, revision=revision)
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise DataError(
            f"muse: {repository} {name}/{split} cannot be fetched from the hub ({one_line(error)});"
            " give --data-root DIR with muse/news or muse/books, or run once on a machine with a"
            " network"
        ) from None
    return [dict(row) for row in table]


def _rows(read: ReadSplit, name: str, split: str, *columns: str) -> list[tuple[Any, ...]]:
    """The columns of a split; none where it is absent.  A text may stand alone."""
    rows: list[tuple[Any, ...]] = []
    for number, row in enumerate(read(name, split) or (), 1):
        values = row if isinstance(row, Mapping) else {}
        texts = [row] if isinstance(row, str) else [values.get(column) for column in columns]
        if len(texts) != len(columns) or not all(isinstance(text, str) for text in texts):
            needed = " and ".join(columns)
            raise DataError(
                f"muse: {name}/{split} row {number} needs {needed}; fetch the file again"
            )
        rows.append(tuple(texts))
    return rows


def _texts(read: ReadSplit, name: str, split: str, origin: str) -> list[str]:
    """Texts of a split that must be there."""
    rows = _rows(read, name, split, "text")
    if not any(text.strip() for (text,) in rows):
        raise DataError(
            f"muse: {name}/{split} is missing in {origin}; add it, or give data.passages, which"
            " needs verbmem and privleak alone"
        )
    return [text for (text,) in rows]


# -- what becomes of them -------------------------------------------------------------------------

Pieces = tuple[list[list[str]], list[str], list[Item]]
"""Texts of each fold, retained texts, items that are measured."""


def _raw(read: ReadSplit, config: MuseData, origin: str) -> Pieces:
    """The whole corpus."""
    if isinstance(config.folds, str):
        splits = [f"forget_{number + 1}" for number in range(FOLDS)]
        forget, seen = [], set[str]()
        for split in splits:
            texts = _texts(read, config.folds, split, origin)
            forget.append([text for text in texts if text not in seen])
            seen.update(texts)
    else:
        texts = _texts(read, "raw", "forget", origin)
        forget = [_share(texts, number, config.requests) for number in range(config.requests)]
    measured = [
        Item("verbmem", -1, *row) for row in _rows(read, "verbmem", "forget", "prompt", "gt")
    ]
    for split in ("forget", "holdout"):
        rows = _rows(read, "privleak", split, "text")
        measured += [Item(f"privleak_{split}", -1, "", text) for (text,) in rows]
    return forget, _texts(read, "raw", "retain1", origin), measured


def _passages(read: ReadSplit, config: MuseData, origin: str) -> Pieces:
    """See :attr:`MuseData.passages`."""
    count, length = config.passages or 0, config.passage_length
    verbatim = _rows(read, "verbmem", "forget", "prompt", "gt")[:count]
    others = {
        split: _rows(read, "privleak", split, "text")[:count] for split in ("retain", "holdout")
    }
    fewest = min(len(verbatim), *map(len, others.values()))
    if fewest < count:
        raise DataError(
            f"data.passages {count}: {origin} has only {fewest} rows of verbmem, privleak/retain or"
            " privleak/holdout; lower it"
        )
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


def _questions(read: ReadSplit, config: MuseData) -> Mapping[str, list[Item]]:
    """Set -> questions; shots are kept whole."""
    sets = {}
    for name, split in QUESTIONS.items():
        limit = None if name.endswith(SHOTS) else config.qa_pairs
        rows = _rows(read, "knowmem", split, "question", "answer")[:limit]
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
