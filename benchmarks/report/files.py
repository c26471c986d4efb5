"""Writes the files of a report; a reader never sees half a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.files import sweep, write_text


def json_text(value: Any) -> str:
    """Strict JSON, indented."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Creates the folder and replaces each file at once."""
    sweep(folder)
    for name, text in files.items():
        write_text(folder / name, text)
