"""Readers of text data: settings, and how a corpus is read by them, under one name.

A plugin adds a reader by registering one class; ``data.name`` then chooses it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_serializer, model_validator

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.files import listing
from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.registry import Registry
from stable_forgetting.language.data.corpus import Corpus
from stable_forgetting.language.data.source import Encoder


class TextDataConfig(Grown):
    """Which texts: a reader is a subclass with fields of its own, which ``name`` tells.

    A key of another reader is an error that names the readers which have it, unless its value is
    that of :attr:`absent` (null erases a key of the suite that is extended).  Importing the module
    of a reader must not import torch.

    Attributes:
        name: Of the reader.
        max_length: Longer sequences are cut at the end, in tokens.
    """

    absent: ClassVar[Mapping[str, Any]] = {}
    """Keys that the hashed form always has, with what stands there for a reader without them."""

    name: str = "fictitious"
    max_length: Annotated[int, Field(ge=8)] = 512

    @classmethod
    def of(cls, **fields: Any) -> Any:
        """The config of the reader that ``name`` tells."""
        return cls.model_validate(fields)

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_reader(cls, data: Any, handler: Any) -> Any:
        if not isinstance(data, Mapping):
            return handler(data)
        name = data.get("name", cls.model_fields["name"].default)
        if name not in READERS.names():
            raise ValueError(f"name: unknown '{name}'{did_you_mean(str(name), READERS.names())}")
        if not issubclass(cls, READERS[name]):
            return READERS[name].model_validate(data)
        return handler({key: data[key] for key in data if cls._is_own(key, data[key])})

    @classmethod
    def _is_own(cls, key: str, value: Any) -> bool:
        if key in cls.model_fields:
            return True
        if value is None or (key in cls.absent and cls.absent[key] == value):
            return False
        owners = [name for name in READERS.names() if key in READERS[name].model_fields]
        if owners:
            raise ValueError(f"{key} is only for name: {' and '.join(owners)}; leave it out")
        raise ValueError(f"{key}: unknown key{did_you_mean(key, [*cls.model_fields])}")

    @model_serializer(mode="wrap")
    def _hashed_form(self, handler: Any) -> dict[str, Any]:
        return {**self.absent, **self._later_fields_only_if_set(handler)}

    @abstractmethod
    def read(self, data_root: Path | None) -> Corpus:
        """All items.

        Args:
            data_root: Folder of local data, if there is one.

        Raises:
            DataError: Data are missing or damaged.
        """

    def stand_in(self, data_root: Path | None) -> TextDataConfig:
        """Itself, or invented texts of the same sizes where its files are absent."""
        return self

    def listing(self, data_root: Path | None) -> str:
        """What changes with files that a suite names (``files``), unread; empty where none are."""
        files = getattr(self, "files", None)
        paths = files.values() if isinstance(files, Mapping) else ()
        return listing((data_root or Path.cwd()) / path for path in paths)

    def vocabulary(self, corpus: Corpus) -> Corpus:
        """What a tokenizer is trained on, where one is; a reader may leave doubles out."""
        return corpus

    def in_pieces(self, corpus: Corpus, encoder: Encoder) -> Corpus:
        """The corpus once the tokenizer is known; a reader may divide long texts here."""
        return corpus


FIRST_READERS: Mapping[str, Any] = {
    "source": "auto",
    "authors": None,
    "forget_authors": None,
    "questions": None,
    "data_seed": 0,
    "train_on_facts": False,
    "facts": None,
    "files": None,
}
"""``absent`` of the first readers, which had one config in common."""
READERS: Registry[Any] = Registry(
    "text reader", "stable_forgetting.language.data.readers:TextDataConfig"
)
for _name, _target, _summary in (
    (
        "fictitious",
        "data.fictitious:FictitiousData",
        "authors that are generated (no files, no network)",
    ),
    ("tofu", "data.tofu:TofuData", "locuslab/TOFU, from files or the hub"),
    ("jsonl", "data.files:FilesData", "files of questions and answers, or of plain texts"),
    (
        "muse",
        "data.muse:MuseData",
        "MUSE's news and books, from files or the hub, or invented news",
    ),
    (
        "tdec",
        "data.tdec:TdecData",
        "sets of texts to forget word for word: the extraction challenge, or embedded notes",
    ),
    (
        "chunks",
        "data.chunks:ChunkData",
        "files of plain texts, long ones in chunks of a fixed number of tokens",
    ),
    (
        "wmdp",
        "benchmarks.wmdp:WmdpData",
        "passages and multiple-choice questions (WMDP), or invented ones",
    ),
    (
        "rwku",
        "benchmarks.rwku:RwkuData",
        "passages and probes of what is known (RWKU), or invented ones",
    ),
):
    READERS.register(_name, f"stable_forgetting.language.{_target}", summary=_summary)


def load_corpus(config: TextDataConfig, data_root: Path | None = None) -> Corpus:
    """All items of a data set; the same call in one process reads once.

    Files that a suite names are read anew where their sizes or times changed.

    Raises:
        DataError: Data are missing, damaged or have other rows than they must.
    """
    root = None if data_root is None else Path(data_root).resolve()
    return _load(config.model_dump_json(), root, config.listing(root))


@lru_cache(maxsize=4)
def _load(config_json: str, data_root: Path | None, listing: str) -> Corpus:
    return TextDataConfig.model_validate_json(config_json).read(data_root)
