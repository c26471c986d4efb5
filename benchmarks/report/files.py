"""The formats of a report, and its files; a reader never sees half a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.report import html, markdown, tex
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.common.base.errors import DataError, one_line
from stable_forgetting.common.base.files import sweep, write_text

WRITERS: Mapping[str, Callable[[Sequence[Section]], str]] = {
    "md": markdown.write,
    "tex": tex.write,
    "html": html.write,
}
"""Name of a format -> what writes sections in it."""
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    csv.Error,
)
"""What content of another shape than was written raises."""


@contextmanager
def reading(fault: str, mend: str = "") -> Iterator[None]:
    """Reads what others may have written or changed.

    Raises:
        DataError: It says ``fault``, what was found in brackets, and ``mend``.
    """
    try:
        yield
    except UNREADABLE as error:
        raise DataError(f"{fault} ({one_line(error)}){mend}") from None


def json_text(value: Any) -> str:
    """Strict JSON, indented."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines whose keys are columns, in the order in which they first stand; None is empty."""
    stream = io.StringIO()
    names = dict.fromkeys(name for line in lines for name in line)
    writer = csv.DictWriter(stream, [*names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Creates the folder and replaces each file at once."""
    sweep(folder)
    for name, text in files.items():
        write_text(folder / name, text)
