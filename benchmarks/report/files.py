"""The formats of a report, and its files; a reader never sees half a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.report import html, markdown, tex
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.common.base.files import sweep, write_text

WRITERS: Mapping[str, Callable[[Sequence[Section]], str]] = {
    "md": markdown.write,
    "tex": tex.write,
    "html": html.write,
}
"""Name of a format -> what writes sections in it."""


def json_text(value: Any) -> str:
    """Strict JSON, indented."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Creates the folder and replaces each file at once."""
    sweep(folder)
    for name, text in files.items():
        write_text(folder / name, text)
