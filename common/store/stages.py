"""Content-addressed stage folders: work once, never half.

A stage's key is a hash of everything that its numbers depend on.  Its folder appears by one atomic
rename after ``done.json`` was written last, so whatever exists is complete; two processes racing
on one stage end with one folder.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError, DataError

DONE = "done.json"
ENGINE_VERSION = 1
"""Raised when the loop, the adapters or the scores would give other numbers for the same config;
part of every key, guarded by golden tests."""
KEY_LENGTH = 20
HOST = platform.node().replace("/", "_").replace("@", "_") or "local"
"""A store may be shared by machines, and a process number means nothing on another one."""


def check_writable(path: Path, name: str) -> None:
    """Raises unless a folder can be made at ``path``, or written where it is there.

    Raises:
        ConfigError: It begins with ``name``, what the user calls the folder.
    """
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {path}: {existing} is not a folder that can be written")


class StageStore:
    """Folders under ``root/stages/<kind>-<key>``.

    Args:
        root: The store's root; made when something is written.
    """

    def __init__(self, root: Path):
        self.root = root
        self._stages = root / "stages"

    def folder(self, kind: str, key: str) -> Path:
        """Where a stage's files are, once complete."""
        return self._stages / f"{kind}-{key[:KEY_LENGTH]}"

    def scratch(self, kind: str, key: str) -> Path:
        """A folder for mid-stage checkpoints: it outlives a kill and goes when complete."""
        return self.root / "unfinished" / f"{kind}-{key[:KEY_LENGTH]}"

    def done(self, kind: str, key: str) -> dict[str, Any] | None:
        """What a complete stage says of itself; None if it is not complete."""
        path = self.folder(kind, key) / DONE
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            done: dict[str, Any] = json.loads(content)
            written = done["key"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}: damaged; delete the folder {path.parent} and rerun") from None
        if written != key:
            raise DataError(f"{path}: belongs to another stage; delete {path.parent} and rerun")
        return done

    @contextlib.contextmanager
    def writing(self, kind: str, key: str, about: dict[str, Any]) -> Iterator[Path]:
        """A temporary folder that becomes the stage's when the block ends without an error.

        Args:
            kind: Stage kind.
            key: Full key.
            about: Written as ``done.json`` at the end; the block may still add to it.
        """
        self._stages.mkdir(parents=True, exist_ok=True)
        temporary = self._stages / f".{os.getpid()}@{HOST}@{kind}-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            yield temporary
            write_json(temporary / DONE, {"key": key, "kind": kind, **about})
            try:
                os.rename(temporary, self.folder(kind, key))
            except OSError as error:
                if self.done(kind, key) is None:
                    raise DataError(
                        f"{self.folder(kind, key)}: cannot be completed ({error.strerror}); delete "
                        "it and rerun"
                    ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(self.scratch(kind, key), ignore_errors=True)

    def sweep(self) -> None:
        """Removes temporary folders of this machine whose process is gone."""
        if self._stages.is_dir():
            for leftover in self._stages.glob(f".*@{glob.escape(HOST)}@*"):
                process = leftover.name[1:].partition("@")[0]
                if process.isdigit() and not _alive(int(process)):
                    shutil.rmtree(leftover, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Strict JSON, written beside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
