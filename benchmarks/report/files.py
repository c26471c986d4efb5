"""Writes the files of a report; a reader never sees half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def json_text(value: Any) -> str:
    """Strict JSON, indented."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Creates the folder and replaces each file at once."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / name)
