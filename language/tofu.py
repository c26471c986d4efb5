"""TOFU: fictitious authors from files, from the hub, or generated, as one corpus.

One index space: ``full`` (authors in order, 20 rows each), then ``real_authors``, ``world_facts``,
``holdout`` where there is one, and ``common``: the facts once more, as training text, where the
config asks for it.  Only some rows of ``full`` have a paraphrase and perturbed answers: the first
400 (TOFU's retain_perturbed) and those of forget10.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.hub import one_line, prepare_client
from language.items import Corpus, Item
from language.schemas import TextDataConfig

logger = logging.getLogger(__name__)

REPOSITORY = "locuslab/TOFU"
ROWS_PER_AUTHOR = 20
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

Row = Mapping[str, Any]
Reader = Callable[[str], list[Row] | None]
"""Set name -> rows, None where the set is not there."""


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
        from language.fictitious import generate

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


def _lines(path: Path) -> list[tuple[int, str]]:
    """(number from 1, text) of every line that is not blank."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)}); fetch it again") from None
    # not splitlines: a line separator such as U+2028 may stand inside a text
    lines = enumerate(text.split("\n"), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file, or of one JSON list; plain or gzipped.

    Raises:
        DataError: With the first line that is not a JSON object.
    """
    lines = _lines(path)
    if lines and lines[0][1].startswith("["):
        lines = [(1, "\n".join(line for _, line in lines))]
    rows: list[Any] = []
    for number, line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            raise DataError(
                f"{path}: line {number} is not JSON; mend it, or fetch the file again"
            ) from None
        rows += value if isinstance(value, list) else [value]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}: row {number} is not an object of columns; mend it, or fetch it again"
            )
    return rows


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
    from language.fictitious import REFUSAL_LINES

    return REFUSAL_LINES


def _item(row: Row, set_name: str, index: int, origin: str) -> Item:
    """One row in TOFU's columns; ``index`` counts rows of full, else -1."""
    perturbed = row.get("perturbed_answer") or ()
    texts = {
        "question": row.get("question"),
        "answer": row.get("answer"),
        "paraphrased_answer": row.get("paraphrased_answer", ""),
        "paraphrased_question": row.get("paraphrased_question", ""),
        **{f"perturbed_answer[{i}]": text for i, text in enumerate(perturbed)},
    }
    for column, text in texts.items():
        if not isinstance(text, str) or (column in ("question", "answer") and not text.strip()):
            raise DataError(
                f"{origin}: {set_name}: column {column} is not text, or is empty; mend it, or fetch"
                " the file again"
            )
    return Item(
        set=set_name,
        group=index // ROWS_PER_AUTHOR if index >= 0 else -1,
        question=row["question"],
        answer=row["answer"],
        paraphrase=row.get("paraphrased_answer"),
        perturbed=tuple(perturbed),
        paraphrased_question=row.get("paraphrased_question"),
    )


# -- files of one's own ---------------------------------------------------------------------------


def _from_files(config: TextDataConfig, data_root: Path | None) -> Corpus:
    root = data_root or Path.cwd()
    items: list[Item] = []
    for set_name, path in (config.files or {}).items():
        items += read_items(root / path, set_name)
    return Corpus(tuple(items), f"jsonl ({', '.join(sorted(config.files or {}))})", _no_refusals())


def _no_refusals() -> tuple[str, ...]:
    from language.fictitious import REFUSAL_LINES

    return REFUSAL_LINES


def read_items(path: Path, set_name: str) -> list[Item]:
    """Items of a JSON-lines file: rows with question and answer (and TOFU's further columns), or
    with ``text`` alone.

    Raises:
        DataError: The file is missing, empty, damaged, or a row has neither.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a JSON-lines file")
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: has no rows; give one or more")
    items = []
    for number, row in enumerate(rows, 1):
        where = f"{path} row {number}"
        if "text" in row:
            if row.keys() & {"question", "answer"}:
                raise DataError(
                    f"{path}: row {number} has text beside question or answer; keep one"
                )
            row = {"question": "", "answer": row["text"]}
        elif not {"question", "answer"} <= row.keys():
            raise DataError(f"{path}: row {number} needs question and answer, or text")
        elif row["question"] == "":
            raise DataError(f"{where}: question is empty; give the answer alone as text")
        items.append(_user_item(row, set_name, where))
    return items


def _user_item(row: Row, set_name: str, origin: str) -> Item:
    if row["question"] == "":
        if not isinstance(row["answer"], str):
            raise DataError(f"{origin}: text is not a text; put it in quotes")
        if not row["answer"].strip():
            raise DataError(f"{origin}: text is empty; remove the row")
        return Item(set_name, -1, "", row["answer"])
    return _item(row, set_name, -1, origin)
