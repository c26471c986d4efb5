"""Readers of text data: a config and a function from it to a corpus, under one name.

A plugin adds a reader by registering one class; ``data.name`` then chooses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from stable_forgetting.common.base.registry import Registry
from stable_forgetting.language.config import Variant
from stable_forgetting.language.data.corpus import Corpus

if TYPE_CHECKING:
    from stable_forgetting.language.data.source import Encoder


class TextDataConfig(Variant):
    """Which texts; each reader has fields of its own.

    Attributes:
        name: Of the reader.
        max_length: Longer sequences are cut at the end, in tokens.
    """

    name: str = "fictitious"
    max_length: Annotated[int, Field(ge=8)] = 512

    @classmethod
    def kinds(cls) -> Mapping[str, type[Variant]]:
        """Reader -> its config."""
        return {entry.name: READERS[entry.name].Config for entry in READERS}


class FirstReaders(TextDataConfig):
    """The hashed form of the first readers, which had one config in common."""

    absent: ClassVar[Mapping[str, Any]] = {
        "source": "auto",
        "authors": None,
        "forget_authors": None,
        "questions": None,
        "data_seed": 0,
        "train_on_facts": False,
        "facts": None,
        "files": None,
    }


class Reader(ABC):
    """Where texts come from.

    Importing its module must not import torch.
    """

    Config: ClassVar[type[TextDataConfig]]

    @classmethod
    @abstractmethod
    def read(cls, config: Any, data_root: Path | None) -> Corpus:
        """All items.

        Args:
            config: A :attr:`Config`.
            data_root: Folder of local data, if there is one.

        Raises:
            DataError: Data are missing or damaged.
        """

    @classmethod
    def stand_in(cls, config: Any, data_root: Path | None) -> Any:
        """The config, or one of invented texts of the same sizes where its files are absent."""
        return config

    @classmethod
    def vocabulary(cls, config: Any, corpus: Corpus) -> Corpus:
        """What a tokenizer is trained on, where one is; a reader may leave doubles out."""
        return corpus

    @classmethod
    def in_pieces(cls, config: Any, corpus: Corpus, encoder: Encoder) -> Corpus:
        """The corpus once the tokenizer is known; a reader may divide long texts here."""
        return corpus


READERS: Registry[Any] = Registry("text reader", "stable_forgetting.language.data.readers:Reader")
for _name, _target, _summary in (
    (
        "fictitious",
        "fictitious:FictitiousReader",
        "authors that are generated (no files, no network)",
    ),
    ("tofu", "tofu:TofuReader", "locuslab/TOFU, from files or the hub"),
    ("jsonl", "files:FilesReader", "files of questions and answers, or of plain texts"),
    ("muse", "muse:MuseReader", "MUSE's news and books, from files or the hub, or invented news"),
    (
        "tdec",
        "tdec:TdecReader",
        "sets of texts to forget word for word: the extraction challenge, or embedded notes",
    ),
    (
        "chunks",
        "chunks:ChunkReader",
        "files of plain texts, long ones in chunks of a fixed number of tokens",
    ),
):
    READERS.register(_name, f"stable_forgetting.language.data.{_target}", summary=_summary)
for _name, _target, _summary in (
    ("wmdp", "wmdp:WmdpReader", "passages and multiple-choice questions (WMDP), or invented ones"),
    ("rwku", "rwku:RwkuReader", "passages and probes of what is known (RWKU), or invented ones"),
):
    READERS.register(_name, f"stable_forgetting.language.benchmarks.{_target}", summary=_summary)


def load_corpus(config: TextDataConfig, data_root: Path | None = None) -> Corpus:
    """All items of a data set; the same call in one process reads once.

    Args:
        config: Which data set and how much of it.
        data_root: Folder that holds the reader's files.

    Raises:
        DataError: Data are missing, damaged or have other rows than they must.
    """
    return _load(config.model_dump_json(), None if data_root is None else Path(data_root).resolve())


@lru_cache(maxsize=4)
def _load(config_json: str, data_root: Path | None) -> Corpus:
    config = TextDataConfig.model_validate_json(config_json)
    return READERS[config.name].read(config, data_root)
