"""Files that survive a power cut, and their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_BESIDE = re.compile(r"\.\d+\.[0-9a-f]{8}$")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Mapping[str, Any]) -> str:
    """SHA-256 of a document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def listing(places: Iterable[Path]) -> str:
    """SHA-256 of the names, sizes and times of files, and of those in folders; none is read.

    Empty where a place is not there.
    """
    lines = []
    for place in places:
        if not place.exists():
            return ""
        inside = sorted(place.iterdir()) if place.is_dir() else [place]
        for file in (path for path in inside if path.is_file()):
            about = file.stat()
            lines.append(f"{file.name}\0{about.st_size} {about.st_mtime_ns}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def sync(paths: Iterable[Path]) -> None:
    """Waits until the content of files, or the names in folders, is on the disk."""
    for path in paths:
        if path.is_dir() and os.name == "nt":  # Windows opens no folder
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # file systems such as shared folders of virtual machines sync no folder
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(handle)


def make_folder(path: Path) -> None:
    """A folder and those above it; new names are on the disk afterwards."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    sync(folder.parent for folder in new)


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


def sweep(folder: Path, age: float = 3600.0) -> None:
    """Removes what :func:`beside` named and a killed writer left, after ``age`` seconds."""
    for leftover in folder.glob(".*.*.*"):
        with contextlib.suppress(OSError):
            if _BESIDE.search(leftover.name) and time.time() - leftover.stat().st_mtime >= age:
                leftover.unlink()


@contextlib.contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """A lock that ends with the process that holds it, on a file that ends with the lock.

    Yields:
        Whether it was free.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=-1 if wait else 0, thread_local=False)
    try:
        lock.acquire(poll_interval=0.2)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):  # whoever waits makes a new file
            path.unlink()
        lock.release()


def write_text(path: Path, text: str) -> None:
    """UTF-8 text, whole or not at all."""
    make_folder(path.parent)
    temporary = beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Strict JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
