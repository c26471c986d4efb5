"""Files that survive a power cut, and their digests."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Mapping[str, Any]) -> str:
    """SHA-256 of a document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sync(paths: Iterable[Path]) -> None:
    """Waits until the content of files, or the names in folders, is on the disk."""
    for path in paths:
        if path.is_dir() and os.name == "nt":  # Windows opens no folder
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def publish(temporary: Path, path: Path) -> None:
    """Renames a file or folder over its final name, so that even a power cut keeps it whole."""
    inside = sorted(temporary.rglob("*")) if temporary.is_dir() else []
    sync([*(entry for entry in inside if not entry.is_symlink()), temporary])
    if temporary.is_dir():
        os.rename(temporary, path)
    else:
        os.replace(temporary, path)
    sync([path.parent])


def beside(path: Path) -> Path:
    """A name for a file that is written first and published as ``path`` later."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")


def write_text(path: Path, text: str) -> None:
    """UTF-8 text, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Strict JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
