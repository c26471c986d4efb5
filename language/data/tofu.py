"""TOFU: fictitious authors from files, from the hub, or generated, as one corpus.

One index space: ``full`` (authors in order, 20 rows each), then ``real_authors``, ``world_facts``,
``holdout`` where there is one, and ``common``: the facts once more, as training text, where the
config asks for it.  Only some rows of ``full`` have a paraphrase and perturbed answers: the first
400 (TOFU's retain_perturbed) and those of forget10.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from common.base.errors import DataError, one_line
from common.base.hub import prepare_client
from language.config import TextDataConfig
from language.data.corpus import Corpus, Item
from language.data.files import Row, _item, _lines, read_rows

logger = logging.getLogger(__name__)

REPOSITORY = "locuslab/TOFU"
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
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
Reader = Callable[[str], list[Row] | None]
"""Set name -> rows, None where the set is not there."""


# -- TOFU -----------------------------------------------------------------------------------------


def _tofu(config: TextDataConfig, data_root: Path | None) -> Corpus:
    folder = _folder(data_root)
    if config.source == "folder" or (config.source == "auto" and folder is not None):
        if folder is None:
            raise DataError(
                f"tofu: no tofu/full.jsonl in {data_root}; give --data-root DIR with tofu/*.jsonl"
            )
        return _assemble(lambda name: _read_set(folder, name), str(folder), "tofu (local files)")
    return _assemble(_read_hub, REPOSITORY, f"{REPOSITORY} (hub)")


def _folder(data_root: Path | None) -> Path | None:
    """Where TOFU's files lie: tofu/, the hub's locuslab/TOFU/, or the data root itself."""
    if data_root is None:
        return None
    for folder in (data_root / "tofu", data_root / REPOSITORY, data_root):
        if _file(folder, "full") is not None:
            return folder
    return None


def _file(folder: Path, name: str) -> Path | None:
    paths = (folder / f"{name}{suffix}" for suffix in _SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _read_set(folder: Path, name: str) -> list[Row] | None:
    path = _file(folder, name)
    if path is None:
        return None
    if name == REFUSALS:
        return [{"answer": line} for _, line in _lines(path)]
    return read_rows(path)


def _read_hub(name: str) -> list[Row] | None:
    """One config of the hub's data set; None for what the hub does not have."""
    if name == REFUSALS:
        return None
    import datasets

    prepare_client()
    try:
        table = datasets.load_dataset(REPOSITORY, name, split="train")
    except Exception as error:  # hub clients raise many unrelated types without a network
        if name in OPTIONAL_ROWS:
            logger.info("%s: no %s (%s)", REPOSITORY, name, one_line(error))
            return None
        raise DataError(
            f"tofu: {REPOSITORY} cannot be fetched from the hub ({one_line(error)}); give"
            " --data-root DIR with tofu/*.jsonl, or run once on a machine with a network"
        ) from None
    return [dict(row) for row in table]


def _assemble(read: Reader, origin: str, provenance: str) -> Corpus:
    sets = {name: _checked(read(name), name, count, origin) for name, count in ROWS.items()}
    full = [_item(row, "full", index, origin) for index, row in enumerate(sets["full"])]
    for name, start in (("retain_perturbed", 0), ("forget10_perturbed", 3600)):
        for offset, row in enumerate(sets[name]):
            item = _item(row, "full", start + offset, f"{origin} {name}")
            if (item.question, item.answer) != _pair(full[start + offset]):
                raise DataError(
                    f"{origin}: {name} row {offset} is not row {start + offset} of full;"
                    " fetch both from one release"
                )
            full[start + offset] = item
    items = list(full)
    for name in ("real_authors", "world_facts"):
        items += [_item(row, name, -1, origin) for row in sets[f"{name}_perturbed"]]
    for name, count in OPTIONAL_ROWS.items():
        found = read(name)
        if found is not None:
            items += [
                _item(row, "holdout", -1, origin) for row in _checked(found, name, count, origin)
            ]
    return Corpus(tuple(items), provenance, _refusals(read))


def _pair(item: Item) -> tuple[str, str]:
    return item.question, item.answer


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


def _refusals(read: Reader) -> tuple[str, ...]:
    rows = read(REFUSALS)
    if rows:
        return tuple(str(row["answer"]) for row in rows)
    from language.data.fictitious import REFUSAL_LINES

    return REFUSAL_LINES
