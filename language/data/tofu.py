"""TOFU: fictitious authors from files, from the hub, or generated, as one corpus.

One index space: ``full`` (authors in order, 20 rows each), then ``real_authors``, ``world_facts``,
``holdout`` where there is one, and ``common``: the facts once more, as training text, where the
config asks for it.  Only some rows of ``full`` have a paraphrase and perturbed answers: the first
400 (TOFU's retain_perturbed) and those of forget10.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.language.data.corpus import FACTS, Corpus
from stable_forgetting.language.data.fictitious import REFUSAL_LINES, FictitiousData
from stable_forgetting.language.data.files import (
    hub_rows,
    item_of,
    lines_of,
    read_rows,
    stored,
)
from stable_forgetting.language.data.forms import Row
from stable_forgetting.language.data.readers import FIRST_READERS, TextDataConfig

logger = logging.getLogger(__name__)

REPOSITORY = "locuslab/TOFU"
INSTEAD = "give --data-root DIR (data_root=) with tofu/*.jsonl"
ROWS: Mapping[str, int] = {
    "full": 4000,
    "retain_perturbed": 400,
    "forget10_perturbed": 400,
    "real_authors_perturbed": 100,
    "world_facts_perturbed": 117,
}
"""Sets that are read, with the rows that they must have."""

OPTIONAL_ROWS: Mapping[str, int] = {"holdout10": 400}
REFUSALS = "idontknow"
ReadSet = Callable[[str], list[Row] | None]
"""Set name -> rows, None where the set is not there."""


class TofuData(TextDataConfig):
    """How much of TOFU.

    Attributes:
        source: Its files below the data root (``folder``), or the ``hub`` of the datasets library.
            ``auto`` takes the folder where there is one.
        authors: Keep this many authors from the start; all 200 when absent.
        forget_authors: Keep this many more from the end: who ``scenario.kind: authors`` forgets.
            Goes with ``authors``.
        train_on_facts: Put the questions of real_authors and world_facts into the training text
            too.  A model that was trained from scratch knows nothing of them otherwise.
        facts: Keep this many questions of real_authors and this many of world_facts, from the
            start; all of them when absent.
    """

    absent: ClassVar[Mapping[str, Any]] = FIRST_READERS

    name: Literal["tofu"] = "tofu"
    source: Literal["auto", "folder", "hub"] = "auto"
    authors: Count | None = None
    forget_authors: Count | None = None
    train_on_facts: bool = False
    facts: Count | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> TofuData:
        if (self.authors is None) != (self.forget_authors is None):
            raise ValueError("authors and forget_authors belong together: give both or none")
        return self

    def read(self, data_root: Path | None) -> Corpus:
        """The sets that are kept."""
        corpus = _fewer_facts(_subset(_whole(self, data_root), self), self.facts)
        return corpus.with_facts() if self.train_on_facts else corpus

    def stand_in(self, data_root: Path | None) -> TextDataConfig:
        """As many fictitious authors."""
        if _folder(data_root) is not None and self.source != "hub":
            return self
        authors, forget = self.authors or 180, self.forget_authors or 20
        return FictitiousData(
            authors=authors,
            forget_authors=forget,
            train_on_facts=self.train_on_facts,
            max_length=self.max_length,
        )


def _whole(config: TofuData, data_root: Path | None) -> Corpus:
    folder = _folder(data_root)
    if config.source == "folder" or (config.source == "auto" and folder is not None):
        if folder is None:
            raise DataError(f"tofu: no tofu/full.jsonl in {data_root or 'any folder'}; {INSTEAD}")
        return _assemble(lambda name: _read_set(folder, name), str(folder), "tofu (local files)")
    return _assemble(_read_hub, REPOSITORY, f"{REPOSITORY} (hub)")


def _fewer_facts(corpus: Corpus, count: int | None) -> Corpus:
    """The first ``count`` rows of real_authors and of world_facts."""
    if count is None:
        return corpus
    dropped = {index for name in FACTS for index in corpus.where(name)[count:]}
    items = tuple(item for index, item in enumerate(corpus.items) if index not in dropped)
    note = f"first {count} real authors' and world facts' questions"
    return replace(corpus, items=items, provenance=f"{corpus.provenance}, {note}")


def _subset(corpus: Corpus, config: TofuData) -> Corpus:
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


def _folder(data_root: Path | None) -> Path | None:
    """Where TOFU's files lie: tofu/, the hub's locuslab/TOFU/, or the data root itself."""
    if data_root is None:
        return None
    for folder in (data_root / "tofu", data_root / REPOSITORY, data_root):
        if stored(folder, "full") is not None:
            return folder
    return None


def _read_set(folder: Path, name: str) -> list[Row] | None:
    path = stored(folder, name)
    if path is None:
        return None
    if name == REFUSALS:
        return [{"answer": line} for _, line in lines_of(path)]
    return read_rows(path)


def _read_hub(name: str) -> list[Row] | None:
    """One config of the hub's data set; None for what the hub does not have."""
    if name == REFUSALS:
        return None
    try:
        return hub_rows(
            REPOSITORY,
            name,
            "train",
            what=f"tofu: {REPOSITORY}",
            instead=INSTEAD,
        )
    except DataError as error:
        if name not in OPTIONAL_ROWS:
            raise
        logger.info("%s: no %s (%s)", REPOSITORY, name, error)
        return None


def _assemble(read: ReadSet, origin: str, provenance: str) -> Corpus:
    sets = {name: _checked(read(name), name, count, origin) for name, count in ROWS.items()}
    full = [item_of(row, "full", index, origin) for index, row in enumerate(sets["full"])]
    for name, start in (("retain_perturbed", 0), ("forget10_perturbed", 3600)):
        for offset, row in enumerate(sets[name]):
            item = item_of(row, "full", start + offset, f"{origin} {name}")
            whole = full[start + offset]
            if (item.question, item.answer) != (whole.question, whole.answer):
                raise DataError(
                    f"{origin}: {name} row {offset} is not row {start + offset} of full;"
                    " fetch both from one release"
                )
            full[start + offset] = item
    items = list(full)
    for name in ("real_authors", "world_facts"):
        items += [item_of(row, name, -1, origin) for row in sets[f"{name}_perturbed"]]
    for name, count in OPTIONAL_ROWS.items():
        rows = read(name)
        if rows is not None:
            items += [
                item_of(row, "holdout", -1, origin) for row in _checked(rows, name, count, origin)
            ]
    rows = read(REFUSALS)
    if rows is None:
        provenance += (
            "; refusals invented, as there is no idontknow.jsonl (github.com/locuslab/tofu)"
        )
        logger.warning("%s: TOFU's refusals are absent; invented ones train DPO and IDK", origin)
        return Corpus(tuple(items), provenance, REFUSAL_LINES)
    return Corpus(tuple(items), provenance, tuple(str(row["answer"]) for row in rows))


def _checked(rows: list[Row] | None, name: str, count: int, origin: str) -> list[Row]:
    if rows is None:
        raise DataError(f"{origin}: {name}.jsonl is missing; fetch it from {REPOSITORY}")
    if len(rows) != count:
        raise DataError(f"{origin}: {name} has {len(rows)} rows instead of {count}; fetch it again")
    wrong = {len(row.get("perturbed_answer") or ()) for row in rows}
    if name.endswith("_perturbed") and (len(wrong) != 1 or 0 in wrong):
        raise DataError(
            f"{origin}: {name} has rows with {sorted(wrong)} perturbed answers; fetch it again"
        )
    return rows
