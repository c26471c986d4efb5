"""Published TOFU evaluation logs (``eval_log_aggregated.json``) as columns for the metrics."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.metrics.tofu import Columns

FOLDER = "tofu_eval_logs"
SUFFIX = ".json.gz"
PART_FILES = {
    "forget": "eval_log_forget.json",
    "retain": "eval_log.json",
    "test_real_authors": "eval_real_author_wo_options.json",
    "test_world_facts": "eval_real_world_wo_options.json",
}
"""Part -> the log's top-level key."""

_COLUMNS = {
    "answer_loss": "avg_gt_loss",
    "paraphrase_loss": "avg_paraphrased_loss",
    "perturbed_loss": "average_perturb_loss",
    "rouge_1_recall": "rouge1_recall",
    "rouge_l_recall": "rougeL_recall",
}


@dataclass(frozen=True)
class EvaluationLog:
    """One model's published evaluation.

    Attributes:
        name: File name without its ending, such as ``phi_full_wd0.01``.
        parts: Part -> per-sample columns, rows in the order of the log.
        answers: Part -> (generated text, ground truth) per row, where the log has them.
    """

    name: str
    parts: Mapping[str, Columns]
    answers: Mapping[str, list[tuple[str, str]]]

    @property
    def split(self) -> str:
        """What it was trained on: ``full``, ``retain90``, ..."""
        return self.name.split("_")[1]


def read_log(path: Path) -> EvaluationLog:
    """Reads one log.

    Raises:
        DataError: It is not such a log.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
        parts = {part: _columns(content[key]) for part, key in PART_FILES.items()}
        answers = {part: _answers(content[key]) for part, key in PART_FILES.items()}
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise DataError(f"{path}: not a TOFU evaluation log ({error!r}); get it anew") from None
    if not all(_sound(columns) for columns in parts.values()):
        raise DataError(f"{path}: has no rows, or numbers that are not finite; get it anew")
    name = path.name.removesuffix(SUFFIX)
    return EvaluationLog(name, parts, {part: rows for part, rows in answers.items() if rows})


def _columns(log: Mapping[str, Mapping[str, Any]]) -> Columns:
    rows = list(log[_COLUMNS["answer_loss"]])
    return {
        column: np.asarray([log[key][row] for row in rows], dtype=np.float64)
        for column, key in _COLUMNS.items()
    }


def _sound(columns: Columns) -> bool:
    return all(len(column) and np.isfinite(column).all() for column in columns.values())


def _answers(log: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    rows = [(row[1], row[2]) for row in log.get("generated_text", {}).values()]
    texts = all(isinstance(text, str) for row in rows for text in row)
    if rows and (not texts or len(rows) != len(log[_COLUMNS["answer_loss"]])):
        raise ValueError("generated_text is not one pair of texts for every row")
    return rows


def read_logs(data_root: Path) -> dict[str, EvaluationLog]:
    """All logs in ``data_root/tofu_eval_logs`` by name.

    Raises:
        DataError: There is none.
    """
    paths = sorted((data_root / FOLDER).glob(f"*_*{SUFFIX}"))
    if not paths:
        raise DataError(
            f"{data_root / FOLDER}: no published TOFU logs here; give the folder that holds "
            f"{FOLDER}/ as --data-root"
        )
    return {log.name: log for log in map(read_log, paths)}


def read_reference_values(data_root: Path) -> dict[str, dict[str, Any]]:
    """Log name -> metric -> value, of ``reference_values.json``.

    Raises:
        DataError: It is missing or damaged.
    """
    path = data_root / FOLDER / "reference_values.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        numbers = [
            n for of_log in values.values() for value in of_log.values() for n in _flat(value)
        ]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; put it beside the logs") from None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not readable ({error}); get it anew") from None
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise DataError(f"{path}: holds a value that is not a finite number; get it anew")
    return values


def _flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
