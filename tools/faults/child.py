"""Commands in forked processes that a trap ends: no import is paid twice."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.cli import main as cli
from stable_forgetting.benchmarks.cli import options

_EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
_TRAPS: list[Trap] = []


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Exit code; negative for a signal.
        out: What it printed.
        err: What it wrote to the error stream.
    """

    code: int
    out: str
    err: str

    @property
    def traceback(self) -> bool:
        """Whether a user was shown a traceback."""
        return "Traceback" in self.err or "Traceback" in self.out


@dataclass
class Trap:
    """Ends, fails or counts a process's changes to files below a folder.

    Attributes:
        folder: What lies elsewhere is not counted.
        at: Number of the change, from 1, before which it acts; 0 only counts.
        full: This and every later change finds no room; else the process is killed.
        log: File that is given the name of every finished stage.
    """

    folder: Path
    at: int = 0
    full: bool = False
    log: Path | None = None
    count: int = 0

    def arm(self) -> None:
        """Acts from now on, until this process ends."""
        if not _TRAPS:
            sys.addaudithook(_see)
        _TRAPS.append(self)
        sync = os.fsync

        def fsync(handle: Any) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            self.change(path)
            sync(handle)
            self.seen("fsync", path)

        setattr(os, "fsync", fsync)  # noqa: B010 - no part of its type

    def seen(self, event: str, path: str, target: str = "") -> None:
        """A change that is about to be made, or a syncing that was; for those who keep a book."""

    def change(self, path: str, target: str = "") -> None:
        """One change of a file or folder; ``target`` is the new name of a renamed one."""
        if not path.startswith(str(self.folder)):
            return
        self.count += 1
        if self.log is not None and Path(target).parent.name == "stages":
            handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{Path(target).name}\n".encode())
            os.close(handle)
        if 0 < self.at <= self.count:
            if not self.full:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _see(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = args
        if isinstance(path, str) and flags & (os.O_WRONLY | os.O_RDWR):
            for trap in _TRAPS:
                trap.change(path)
    elif event in _EVENTS and isinstance(args[0], str | Path):
        for trap in _TRAPS:
            target = str(args[1]) if event == "os.rename" else ""
            if event in ("os.rename", "os.mkdir") or not trap.full:  # removing needs no room
                trap.change(str(args[0]), target)
            trap.seen(event, str(args[0]), target)
    elif event == "shutil.rmtree":
        for trap in _TRAPS:
            trap.seen(event, str(args[0]))


class Child:
    """A forked process that runs something with the interpreter's modules already imported."""

    def __init__(self, folder: Path, work: Callable[[], None]):
        folder.mkdir(parents=True, exist_ok=True)
        self._streams = folder / "out.txt", folder / "err.txt"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(work)

    def _live(self, work: Callable[[], None]) -> None:
        code = 70
        try:
            for number, path in enumerate(self._streams, 1):
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code & 0xFF)

    def kill(self) -> None:
        """Without a chance to tidy up."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit: float = 300.0) -> Ended:
        """Its end; after ``limit`` seconds it is killed."""
        end = time.monotonic() + limit
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > end:
                self.kill()
                end = float("inf")
            time.sleep(0.005)
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self._streams)
        return Ended(os.waitstatus_to_exitcode(status), out, err)


def command(folder: Path, *args: object, trap: Trap | None = None) -> Child:
    """Starts ``unlearn ARGS`` in a forked process, whose streams are kept in ``folder``."""

    def work() -> None:
        for console in (options.console, options.error_console):
            console._file = None  # the stream of now
        sys.argv = ["unlearn", *map(str, args)]
        if trap is not None:
            trap.arm()
        cli.main()

    return Child(folder, work)
