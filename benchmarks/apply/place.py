"""Where an application works: a folder beside what it writes, taken up again after a kill."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.files import file_digest, held, json_digest, publish, write_json
from stable_forgetting.common.store.stages import check_writable

_NOTE = "application.json"


class Workplace:
    """Files of one application that is under way."""

    def __init__(self, out: Path, folder: Path):
        self._out, self._folder = out, folder

    def checkpoint_of(self, method: str) -> Path:
        """Of one of several methods; of the only one when empty.  It outlives a kill."""
        name = f"checkpoint-{method}" if method else "checkpoint"
        return self._folder / f"{name}.safetensors"

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """A folder that takes the place of ``out`` when the block ends without an error."""
        new = self._folder / "out"
        new.mkdir()
        yield new
        try:
            publish(new, self._out)
        except OSError as error:
            raise ConfigError(f"{self._out}: cannot be written ({error.strerror})") from None


@contextmanager
def workplace(out: Path, identity: Mapping[str, Any]) -> Iterator[Workplace]:
    """A folder for the work on ``out``; all launched processes enter, the first one fills it.

    Checkpoints of the same ``identity``, of all that the result depends on, are left where they
    are; those of another one are removed.
    """
    folder, lock = _beside(out)
    if not processes.is_main():
        processes.wait_for_all()
        yield Workplace(out, folder)
        return
    with held(lock) as free:
        if not free:
            raise ConfigError(f"{out}: another process writes it; wait, or choose another folder")
        _prepare(folder, json_digest(identity))
        processes.wait_for_all()
        try:
            yield Workplace(out, folder)
        except KeyboardInterrupt:
            if not any(folder.glob("checkpoint*")):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def check_out(out: Path) -> None:
    """Refuses a folder that holds something, cannot be written, or cannot be replaced."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        tidy(out)
        raise ConfigError(f"{out}: exists and is not an empty folder; nothing is overwritten")
    check_writable(out, "out")
    # a rename takes the place of the empty folder in the end
    if out.is_symlink() or os.path.ismount(out) or (out.exists() and out.samefile(Path())):
        raise ConfigError(
            f"{out}: is a link, a mounted folder or the working folder, which the result cannot "
            f"replace; give a new folder inside, such as {out / 'forgotten'}"
        )


def tidy(out: Path) -> None:
    """Removes what a process left that was killed when it had just written ``out``."""
    folder, lock = _beside(out)
    if folder.exists() or lock.exists():
        with held(lock) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)


def _beside(out: Path) -> tuple[Path, Path]:
    """The folder of the work on ``out``, and its lock."""
    place = out.absolute()  # a dot alone has no name
    unfinished, lock = (f".{place.name}.{end}" for end in ("unfinished", "lock"))
    return place.parent / unfinished, place.parent / lock


def _prepare(folder: Path, digest: str) -> None:
    """Leaves the checkpoints of an application with this digest, and nothing else."""
    try:
        same = json.loads((folder / _NOTE).read_bytes())["sha256"] == digest
    except (OSError, ValueError, LookupError, TypeError):
        same = False
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
    for leftover in folder.glob("*"):
        if leftover.is_dir() and not leftover.name.startswith("checkpoint"):
            shutil.rmtree(leftover, ignore_errors=True)
        elif leftover.name.startswith("."):
            os.unlink(leftover)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _NOTE, {"sha256": digest})


STATEMENT = "statement.json"


def earlier_requests(weights: Path, digest: Any) -> tuple[list[dict[str, Any]], str]:
    """The earlier requests that the statement beside the given weights tells of, first one first.

    Each with its time, method, data, digests and the digest of its statement; and a warning where
    a statement is there but is not of these weights, whose ``weights_sha256`` is ``digest``.
    """
    path = weights.with_name(STATEMENT)
    if not path.is_file():
        return [], ""
    try:
        statement = json.loads(path.read_text(encoding="utf-8"))
        if statement["output"]["weights_sha256"] != digest:
            return [], f"{path.name} beside the given model is of other weights and was left out"
        request = {key: statement[key] for key in ("created", "seed", "input", "output", "data")}
        request["method"] = statement["method"]["name"]
        request["statement_sha256"] = file_digest(path)
        return [*statement.get("earlier", []), request], ""
    except (OSError, ValueError, LookupError, TypeError):
        return [], f"{path.name} beside the given model cannot be read and was left out"
