"""Progress of a run on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.pipeline.kinds import KINDS
from benchmarks.pipeline.stage import Stage
from common.base import processes


class Display:
    """A :class:`benchmarks.pipeline.schedule.Watcher`.

    Args:
        console: A Rich console; the bar appears only if it is a terminal.
        title: Shown before the bar.
        every: Off a terminal, seconds between lines.
    """

    def __init__(self, console: Any, title: str, every: float = 20.0):
        self._console, self._title, self._every = console, title, every
        self._progress: Any = None
        self._task: Any = None
        self._started = self._spoke = time.monotonic()
        self.total = self.done = self.diverged = 0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.fields[last]}"),
                console=self._console,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._title, total=None, last="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def planned(self, total: int, cached: int) -> None:
        """Shows the size of a plan, and how much of it is stored."""
        self.total, self.done = total, cached
        if self._progress is not None:
            self._progress.update(self._task, total=total, completed=cached)
        else:
            self._say(f"{total} stages, {cached} of them already in the store")

    def finished(self, stage: Stage, status: str) -> None:
        """Shows one more stage, and one that failed or diverged by name."""
        self.done += 1
        note = stage.name if status == "ok" else f"{stage.name}: {status}"
        if status == "failed" or (status != "ok" and KINDS[stage.kind].trains):
            self._console.print(f"  {note}", highlight=False)
        if self._progress is not None:
            self._progress.update(self._task, completed=self.done, last=note)
        elif time.monotonic() - self._spoke > self._every or self.done == self.total:
            self._say(f"{self.done}/{self.total} stages, last: {stage.kind} {note}")

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        elapsed = self._spoke - self._started
        self._console.print(
            f"{self._title}: [{elapsed:5.0f} s] {text}", highlight=False, markup=False
        )


class StepBar:
    """A step bar on a terminal and on rank 0; silent elsewhere."""

    def __init__(self, console: Any, title: str):
        self._console, self._title = console, title
        self._progress: Any = None

    def __enter__(self) -> Callable[[int, int], None] | None:
        if not self._console.is_terminal or not processes.is_main():
            return None
        from rich.progress import Progress

        self._progress = Progress(console=self._console, transient=True)
        self._progress.start()
        task = self._progress.add_task(self._title, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
