"""Content-addressed stage folders: work once, never half, never another's bytes.

A stage's key is a hash of everything that its numbers depend on.  Its folder appears by one atomic
rename after ``done.json`` was written last, so whatever exists is complete.  ``done.json`` holds
the SHA-256 of every file; a file is compared with it before it is read.  A stage that fails is
set aside, so that the next run makes it again.  Whoever works on a stage holds its lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.errors import ConfigError, Damaged, DataError
from stable_forgetting.common.base.files import (
    file_digest,
    held,
    json_digest,
    make_folder,
    publish,
    write_json,
)

DONE = "done.json"
ENGINE_VERSION = 1
"""Raised when the loop, the adapters or the scores would give other numbers for the same config;
part of every key, guarded by golden tests."""
KEY_LENGTH = 20
FREED = "freed"
"""Fact of a stage whose weights were deleted: their digests."""
_CHECKED: dict[Path, tuple[int, int]] = {}
"""Files whose bytes this process has compared -> their size and time of change then."""


def check_writable(path: Path, name: str) -> None:
    """Raises unless a folder can be made at ``path``, or written where it is there.

    Raises:
        ConfigError: It begins with ``name``, what the user calls the folder.
    """
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{name} {path}: a link that leads nowhere; correct it")
    if path.name == ".." and not path.exists():
        raise ConfigError(f"{name} {path}: {path.parent} is not there; name the folder itself")
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {path}: {existing} is not a folder that can be written")


class StageStore:
    """Folders under ``root/stages/<kind>-<key>``."""

    def __init__(self, root: Path):
        self.root = root
        self._stages = root / "stages"

    def folder(self, kind: str, key: str) -> Path:
        """Where a stage's files are, once complete."""
        return self._stages / _name(kind, key)

    def scratch(self, kind: str, key: str) -> Path:
        """A folder for mid-stage checkpoints: it outlives a kill and goes when complete."""
        return self.root / "unfinished" / _name(kind, key)

    # What is read --------------------------------------------------------------------------------

    def done(self, kind: str, key: str) -> dict[str, Any] | None:
        """What a complete stage says of itself; None if it is not complete.

        Raises:
            Damaged: It is not what was written; the stage is set aside.
        """
        path = self.folder(kind, key) / DONE
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            done: dict[str, Any] = json.loads(content)
            written, digest = done["key"], done.pop("sha256", None)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._set_aside(path, "is not readable") from None
        if written != key:
            raise self._set_aside(path, "belongs to another stage")
        if digest not in (None, json_digest(done)):
            raise self._set_aside(path, "is not what was written")
        return done

    def checked(self, kind: str, key: str, *names: str) -> Path:
        """The folder of a complete stage, after its files were compared with their digests.

        A file is compared once per process.  Stages that were made before digests were kept are
        taken as they are.

        Raises:
            DataError: The stage is not complete.
            Damaged: A file is missing or not what was written; the stage is set aside.
            Damaged: Its weights were freed; the stage is set aside, so that it is made again.
        """
        done, folder = self.done(kind, key), self.folder(kind, key)
        if done is None:
            raise DataError(f"{folder}: not complete; run its suite first")
        if not names and FREED in done:
            raise self._set_aside(folder / DONE, "had its weights freed")
        digests = done.get("files", {})
        for name in names or digests:
            if name in digests:
                self._compare(folder / name, digests[name])
        return folder

    def _compare(self, path: Path, digest: str) -> None:
        try:
            status = path.stat()
            seen = (status.st_size, status.st_mtime_ns)
            if _CHECKED.get(path) == seen:
                return
            same = file_digest(path) == digest
        except OSError as error:
            raise self._set_aside(path, f"cannot be read ({error.strerror})") from None
        if not same:
            raise self._set_aside(path, "is not what was written")
        _CHECKED[path] = seen

    def _set_aside(self, path: Path, reason: str) -> Damaged:
        """Moves the stage of a damaged file out of the way; returns the error."""
        stage = path.relative_to(self._stages).parts[0]
        place = self.root / "damaged" / f"{stage}-{secrets.token_hex(4)}"
        try:
            place.parent.mkdir(exist_ok=True)
            os.rename(self._stages / stage, place)
        except OSError:
            if (self._stages / stage).exists():
                return Damaged(f"{path}: {reason}; delete {self._stages / stage} and run again")
            place = place.parent  # another process that saw the damage was faster
        error = Damaged(f"{path}: {reason}; its stage is now in {place} and is made again by a run")
        error.set_aside = True
        return error

    def complete(self, kind: str) -> Iterator[dict[str, Any]]:
        """What the complete stages of a kind say of themselves; what cannot be read is left out."""
        for folder in sorted(_entries(self._stages, f"{kind}-*")):
            try:
                done: dict[str, Any] = json.loads((folder / DONE).read_bytes())
            except (OSError, ValueError):
                continue  # not complete, or named by whoever reads the stage itself
            yield done

    def verify(self) -> Iterator[tuple[Path, str]]:
        """Reads every stage once; damaged ones are set aside.

        Yields:
            A stage's folder, and what is wrong: nothing, ``unchecked`` where it was made before
            digests were kept, or the damage.
        """
        for folder in sorted(_entries(self._stages, "[!.]*-*")):
            kind = folder.name.rpartition("-")[0]
            try:
                done = json.loads((folder / DONE).read_bytes())
                self.checked(kind, str(done["key"]), DONE, *done.get("files", ()))
                yield folder, "" if "files" in done else "unchecked"
            except Damaged as error:
                yield folder, str(error)
            except (OSError, ValueError, LookupError, TypeError, DataError):
                yield folder, str(self._set_aside(folder / DONE, "is not readable"))

    # What is written -----------------------------------------------------------------------------

    def lease(
        self, kind: str, key: str, *, wait: bool = False
    ) -> contextlib.AbstractContextManager[bool]:
        """The right to work on a stage; it ends with the process that holds it.

        It is a lock on a file below ``root/leases``, so that processes, containers and machines
        that share the store's file system do not work on one stage together.
        """
        return held(self.root / "leases" / _name(kind, key), wait=wait)

    @contextlib.contextmanager
    def writing(self, kind: str, key: str, about: dict[str, Any]) -> Iterator[Path]:
        """A temporary folder that becomes the stage's when the block ends without an error."""
        make_folder(self._stages)
        temporary = self._stages / f".{_name(kind, key)}.{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            yield temporary
            done = {"key": key, "kind": kind, **about, "files": digests(temporary)}
            done = json.loads(json.dumps(done, allow_nan=False))
            write_json(temporary / DONE, {**done, "sha256": json_digest(done)})
            try:
                publish(temporary, self.folder(kind, key))
            except OSError:
                if self.done(kind, key) is None:
                    if not self.folder(kind, key).exists():
                        raise
                    damage = self._set_aside(self.folder(kind, key) / DONE, "is missing")
                    if not damage.set_aside:  # it lies in the way and is none
                        raise damage from None
                    publish(temporary, self.folder(kind, key))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(self.scratch(kind, key), ignore_errors=True)

    def free(self, kind: str, key: str, names: Iterable[str]) -> None:
        """Deletes files of a complete stage, which stays complete without them.

        A stage that was made before digests were kept stays as it is.
        """
        names, folder = [*names], self.folder(kind, key)
        done = self.done(kind, key) or {}
        files = done.get("files", {})
        freed = {name: files.pop(name) for name in names if name in files}
        if freed:
            done[FREED] = {**done.get(FREED, {}), **freed}
            write_json(folder / DONE, {**done, "sha256": json_digest(done)})
        for name in done.get(FREED, {}).keys() & names:  # a kill may have left some
            (folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes what ended runs left: temporary folders, scratch of complete stages, leases."""
        for leftover in _entries(self._stages, ".*-*.*"):
            self._remove(leftover, leftover.name[1:].rpartition(".")[0])
        for leftover in _entries(self.root / "unfinished", "*-*"):
            if (self._stages / leftover.name / DONE).is_file():
                self._remove(leftover, leftover.name)
        for lease in _entries(self.root / "leases", "*-*"):
            kind, _, key = lease.name.rpartition("-")
            with self.lease(kind, key):  # one that is free goes with whoever takes it
                pass

    def _remove(self, leftover: Path, name: str) -> None:
        """Removes a folder of the stage called ``name`` unless somebody works on it."""
        kind, _, key = name.rpartition("-")
        with self.lease(kind, key) as free:
            if free:
                shutil.rmtree(leftover, ignore_errors=True)


def _name(kind: str, key: str) -> str:
    return f"{kind}-{key[:KEY_LENGTH]}"


def _entries(folder: Path, pattern: str) -> Iterable[Path]:
    return list(folder.glob(pattern)) if folder.is_dir() else []


def digests(folder: Path) -> dict[str, str]:
    """Name of every file below a folder -> SHA-256 of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}
