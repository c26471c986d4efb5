"""Question-and-answer files -> items."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.base.errors import DataError, one_line
from language.config import TextDataConfig
from language.data.corpus import Corpus, Item

ROWS_PER_AUTHOR = 20

Row = Mapping[str, Any]


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
    from language.data.fictitious import REFUSAL_LINES

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
