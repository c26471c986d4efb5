"""Where a training stands: a small file of the process that trains, for the one that shows it."""

from __future__ import annotations

import contextlib
import json
import math
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


class Pace:
    """Positions of a training, whose phases have a rate each."""

    def __init__(self) -> None:
        self.now = self._began = 0.0
        self._first = self._last = math.inf

    def at(self, step: int, total: int, loss: float) -> Position:
        """The position of a step."""
        self.now = time.monotonic()
        if step <= self._last:
            self._began, self._first = self.now, step
        self._last = step
        return Position(step, total, loss, self.now - self._began, int(step - self._first))


class PositionFile:
    """A ``progress`` hook that keeps the last position in a stage's scratch folder.

    A file, as a worker may be killed at any moment.
    """

    def __init__(self, folder: Path):
        self._path, self._pace, self._written = folder / FILE, Pace(), -math.inf

    def __call__(self, step: int, total: int, loss: float) -> None:
        """Notes the position, at most once in :data:`EVERY` seconds; a full disk is no matter."""
        position = self._pace.at(step, total, loss)
        if self._pace.now - self._written >= EVERY:
            self._written = self._pace.now
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
