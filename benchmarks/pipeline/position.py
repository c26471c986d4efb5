"""Where a training stands: a small file of the process that trains, for the one that shows it."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "progress.json"
EVERY = 1.0
"""Seconds between two writings."""


@dataclass(frozen=True)
class Position:
    """How far a training is.

    Attributes:
        step: Steps done.
        total: Steps in all.
        loss: At the last logged step; NaN before the first.
        seconds: Since the first report of this training in this process.
        steps: Taken in these seconds.
    """

    step: int
    total: int
    loss: float
    seconds: float
    steps: int

    @property
    def left(self) -> float | None:
        """Seconds to the last step at the rate so far; None before there is one."""
        return (self.total - self.step) * self.seconds / self.steps if self.steps else None


class PositionFile:
    """A ``progress`` hook that keeps the last position in a stage's scratch folder.

    A file, as a worker may be killed at any moment.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._began = self._written = float("-inf")
        self._first = self._last = 0

    def __call__(self, step: int, total: int, loss: float) -> None:
        """Notes the position, at most once in :data:`EVERY` seconds; a full disk is no matter."""
        now = time.monotonic()
        if self._began < 0 or step <= self._last:  # a method may train in several phases
            self._began, self._first = now, step
        self._last = step
        if now - self._written < EVERY:
            return
        self._written = now
        position = Position(step, total, loss, now - self._began, step - self._first)
        with contextlib.suppress(OSError):
            self._path.write_text(json.dumps(asdict(position)), encoding="utf-8")


def read_position(folder: Path, since: float) -> Position | None:
    """What was written in a stage's scratch folder after a point of :func:`time.time`."""
    path = folder / FILE
    try:
        if path.stat().st_mtime < since:
            return None
        return Position(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none yet, or half a file
        return None
