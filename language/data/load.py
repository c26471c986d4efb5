"""Config -> corpus."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from common.base.errors import DataError
from language.config import TextDataConfig
from language.data.corpus import Corpus
from language.data.files import _from_files
from language.data.tofu import _tofu


def load_corpus(config: TextDataConfig, data_root: Path | None = None) -> Corpus:
    """All items of a data set; the same call in one process reads once.

    Args:
        config: Which data set and how much of it.
        data_root: Folder that holds ``tofu/`` (or ``locuslab/TOFU/``), or the files of jsonl.

    Raises:
        DataError: A set is missing, damaged or has other rows than it must.
    """
    return _load(config.model_dump_json(), None if data_root is None else Path(data_root).resolve())


@lru_cache(maxsize=4)
def _load(config_json: str, data_root: Path | None) -> Corpus:
    config = TextDataConfig.model_validate_json(config_json)
    if config.name == "jsonl":
        return _from_files(config, data_root)
    if config.name == "fictitious":
        from language.data.fictitious import generate

        corpus = generate(config)
    else:
        corpus = _fewer_facts(_subset(_tofu(config, data_root), config), config.facts)
    return _with_facts(corpus) if config.train_on_facts else corpus


def _fewer_facts(corpus: Corpus, count: int | None) -> Corpus:
    """The first ``count`` rows of real_authors and of world_facts."""
    if count is None:
        return corpus
    dropped = {
        index for name in ("real_authors", "world_facts") for index in corpus.where(name)[count:]
    }
    items = tuple(item for index, item in enumerate(corpus.items) if index not in dropped)
    note = f"first {count} real authors' and world facts' questions"
    return replace(corpus, items=items, provenance=f"{corpus.provenance}, {note}")


def _with_facts(corpus: Corpus) -> Corpus:
    facts = [item for item in corpus.items if item.set in ("real_authors", "world_facts")]
    taught = tuple(replace(item, set="common") for item in facts)
    provenance = f"{corpus.provenance}; its facts are trained on"
    return replace(corpus, items=corpus.items + taught, provenance=provenance)


def _subset(corpus: Corpus, config: TextDataConfig) -> Corpus:
    """The first ``authors`` and the last ``forget_authors`` of ``full``; all other sets whole."""
    if config.authors is None or config.forget_authors is None:
        return corpus
    total = 1 + max(item.group for item in corpus.items)
    if config.authors + config.forget_authors > total:
        raise DataError(
            f"data.authors {config.authors} + forget_authors {config.forget_authors} are more"
            f" than the {total} authors of {config.name}; lower one"
        )
    first, last = config.authors, total - config.forget_authors
    items = tuple(i for i in corpus.items if i.set != "full" or not first <= i.group < last)
    note = f"first {first} and last {config.forget_authors} authors"
    return replace(corpus, items=items, provenance=f"{corpus.provenance}, {note}")
