"""Files of texts, and of questions with answers -> items."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from stable_forgetting.common.base.errors import DataError, one_line
from stable_forgetting.common.base.hub import prepare_client
from stable_forgetting.language.data.corpus import Corpus, Item, check_apart
from stable_forgetting.language.data.fictitious import REFUSAL_LINES
from stable_forgetting.language.data.forms import Row, asked_and_answered
from stable_forgetting.language.data.readers import FIRST_READERS, TextDataConfig

ROWS_PER_AUTHOR = 20
LONGEST = 10_000_000
"""Characters of one text of a row."""
_TOO_LONG = f"longer than {LONGEST:,} characters; divide the row"

RowKind = Literal["text", "answers", "comparisons"]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, plain or gzipped.

    Raises:
        DataError: It is missing, damaged, or not UTF-8.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)}); fetch it again") from None


def lines_of(path: Path) -> list[tuple[int, str]]:
    """(number from 1, text) of every line that is not blank."""
    # not splitlines: a line separator such as U+2028 may stand inside a text
    lines = enumerate(read_text(path).split("\n"), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except Exception as error:  # pyarrow raises types of its own
        raise DataError(f"{path}: is not parquet ({one_line(error)}); fetch it again") from None


def _once(names: Iterable[str], what: str) -> None:
    """Refuses a name that occurs twice, of which only one value would be read."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{what} '{twice}' is there twice; remove or rename one")


def _csv_rows(path: Path) -> list[Row]:
    """Column -> text of every row."""
    csv.field_size_limit(2**31 - 1)  # more is no C long on Windows
    try:
        lines = io.StringIO(read_text(path), newline="")
        reader = csv.DictReader(lines, strict=True)  # half a file ends in quotes
        _once(filter(None, reader.fieldnames or ()), f"{path}: column")
        rows: list[Row] = list(reader)
    except csv.Error as error:
        raise DataError(f"{path}: is not CSV ({error}); mend it, or fetch it again") from None
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise DataError(f"{path}: row {number} has not one value per column; mend it")
    return rows


_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", "-00000-of-00001.parquet", ".parquet")


def stored(folder: Path, name: str) -> Path | None:
    """The file of a set in any of the forms that are read, if there is one."""
    paths = (folder / f"{name}{suffix}" for suffix in _SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def read_values(path: Path) -> list[Any]:
    """Values of a JSON-lines file, or of one JSON list, plain or gzipped; or rows of parquet.

    Raises:
        DataError: With the first line that is not JSON, or has a key twice.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    lines = lines_of(path)
    if lines and lines[0][1].startswith("["):
        lines = [(1, "\n".join(line for _, line in lines))]
    values: list[Any] = []
    for number, line in lines:
        try:
            value = json.loads(line, object_pairs_hook=partial(_object, f"{path}: line {number}"))
            json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
        except DataError:
            raise
        except (ValueError, RecursionError):
            raise DataError(
                f"{path}: line {number} is not JSON; mend it, or fetch the file again"
            ) from None
        values += value if isinstance(value, list) else [value]
    return values


def _object(origin: str, pairs: Sequence[tuple[str, Any]]) -> Row:
    """A JSON object."""
    _once((key for key, _ in pairs), f"{origin}: key")
    return dict(pairs)


def hub_rows(
    repository: str,
    name: str | None,
    split: str,
    *,
    what: str,
    instead: str,
    revision: str = "main",
) -> list[Row]:
    """Rows of a split of one of the hub's data sets.

    Args:
        what: It is called in messages.
        instead: What a user without a network can do.

    Raises:
        DataError: It cannot be fetched.
    """
    import datasets

    prepare_client()
    try:
        table = datasets.load_dataset(repository, name, split=split, revision=revision)
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise DataError(
            f"{what} cannot be fetched from the hub ({one_line(error)}); {instead}, or run once on"
            " a machine with a network"
        ) from None
    return [dict(row) for row in table]


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file, of one JSON list, of parquet, or of a CSV file; plain or gzipped.

    Raises:
        DataError: With the first line that is not a JSON object, or row without all columns.
    """
    if path.name.removesuffix(".gz").endswith(".csv"):
        return _csv_rows(path)
    rows = read_values(path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}: row {number} is not an object of columns; mend it, or fetch it again"
            )
    return rows


def item_of(row: Row, set_name: str, index: int, origin: str) -> Item:
    """One row in TOFU's columns; ``index`` counts rows of full, else -1."""
    perturbed = row.get("perturbed_answer") or ()
    perturbed = perturbed if isinstance(perturbed, list | tuple) else (perturbed,)
    texts = {
        **{name: row.get(name) for name in ("question", "answer")},
        **{name: row.get(name, "") for name in ("paraphrased_answer", "paraphrased_question")},
        **{f"perturbed_answer[{i}]": text for i, text in enumerate(perturbed)},
    }
    for column, text in texts.items():
        if isinstance(text, str) and len(text) > LONGEST:
            raise DataError(f"{origin}: {set_name}: column {column}: {_TOO_LONG}")
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


def below_root(path: str) -> None:
    """Refuses a path of a suite that leaves the data root.

    Raises:
        ValueError: It is absolute, or climbs.
    """
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"files: {path}: must be a path below the data root")


class FilesData(TextDataConfig):
    """Which files.

    Attributes:
        files: Set name -> path below the data root, such as {forget: f.jsonl, retain: r.jsonl}.
            Under ``scenario.kind: files`` real_authors, world_facts and holdout are never trained
            on, and all other sets are.
        rows: What every row of forget and retain has, which decides what the table ranks by:
            ``text`` (anything), ``answers`` (a question), or ``comparisons`` (a question, and wrong
            answers where rows are compared).
    """

    later = {"rows": "text"}
    absent: ClassVar[Mapping[str, Any]] = FIRST_READERS

    name: Literal["jsonl"] = "jsonl"
    files: Mapping[str, str]
    rows: RowKind = "text"

    @model_validator(mode="before")
    @classmethod
    def _names_files(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("files") is None:
            raise ValueError(f"name: {data.get('name')} and files: {{SET: PATH}} belong together")
        return data

    @model_validator(mode="after")
    def _below_the_root(self) -> FilesData:
        for path in self.files.values():
            below_root(path)
        return self

    def read(self, data_root: Path | None) -> Corpus:
        """The rows of all files, set by set."""
        read: dict[str, tuple[str, list[Item]]] = {}
        for set_name, path in self.files.items():
            rows = read_items((data_root or Path.cwd()) / path, set_name)
            if set_name in ("forget", "retain"):
                _check_rows(rows, self.rows, path)
            read[set_name] = path, rows
        check_apart(read, ("forget", "holdout"))
        sets = ", ".join(sorted(self.files))
        items = tuple(item for _, rows in read.values() for item in rows)
        return Corpus(items, f"{self.name} ({sets})", REFUSAL_LINES)


def _check_rows(items: Sequence[Item], rows: RowKind, path: str) -> None:
    asked = all(item.question for item in items)
    compared = any(item.perturbed for item in items)
    if (rows != "text" and not asked) or (rows == "comparisons" and not compared):
        lacking = "wrong answers in any row" if asked else "a question in every row"
        raise DataError(
            f"{path}: data.rows: {rows} promises what is not there: {lacking}; choose data.rows:"
            f" {'answers' if asked else 'text'}, or mend the file"
        )


def read_items(path: Path, set_name: str) -> list[Item]:
    """Items of a JSON-lines file; questions with answers may have TOFU's further columns.

    Raises:
        DataError: The file is missing, empty, damaged, or a row has no form.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a JSON-lines file")
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: has no rows; give one or more")
    return items_of(rows, set_name, str(path))


def items_of(rows: Iterable[Row], set_name: str, origin: str) -> list[Item]:
    """Items of rows in one of :data:`language.data.forms.FORMS`; ``origin`` is what they lie in.

    Raises:
        DataError: A row has no form.
    """
    items = []
    for number, row in enumerate(rows, 1):
        where = f"{origin} row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is a {type(row).__name__}; give a text, or a mapping")
        filled = {k: v for k, v in row.items() if v is not None}  # null: other rows' columns
        items.append(_user_item(asked_and_answered(filled, where), set_name, where))
    return items


def _user_item(row: Row, set_name: str, origin: str) -> Item:
    if row["question"] == "":
        if not isinstance(row["answer"], str):
            raise DataError(f"{origin}: text is not a text; put it in quotes")
        if not row["answer"].strip():
            raise DataError(f"{origin}: text is empty; remove the row")
        if len(row["answer"]) > LONGEST:
            raise DataError(f"{origin}: text: {_TOO_LONG}")
        return Item(set_name, -1, "", row["answer"])
    return item_of(row, set_name, -1, origin)
