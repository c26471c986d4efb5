"""What a person sees: progress while a suite runs (a bar on a terminal, lines elsewhere), then
the leaderboard and where everything lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plan import Stage
from common import processes

if TYPE_CHECKING:
    from benchmarks.audit_report import AuditTable
    from benchmarks.leaderboard import Leaderboard
    from benchmarks.suite import ResolvedSuite
    from common.benchmark import Runtime

WIDE = 146
"""Columns that the full main table needs; a narrower terminal gets the compact one."""


class Display:
    """A :class:`benchmarks.schedule.Watcher`.

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
        """A (re)plan."""
        self.total, self.done = total, cached
        if self._progress is not None:
            self._progress.update(self._task, total=total, completed=cached)
        else:
            self._say(f"{total} stages, {cached} of them already in the store")

    def finished(self, stage: Stage, status: str) -> None:
        """A stage is complete."""
        self.done += 1
        note = stage.name if status == "ok" else f"{stage.name}: {status}"
        if status != "ok" and stage.kind != "evaluate":
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


def print_board(console: Any, board: Leaderboard) -> None:
    """The leaderboard, its legend, its floor and its comparisons."""
    from benchmarks import render
    from benchmarks.tables import rich_table

    spec = board.suite.spec
    title = f"{spec.suite} - {spec.title}" if spec.title else spec.suite
    console.print()
    compact = console.width < WIDE
    heads = render.main_columns(board, compact=compact)
    rows = render.main_rows(board, compact=compact)
    console.print(rich_table(title, heads, rows, tight=compact))
    console.print(render.legend(board), style="dim", highlight=False, markup=False)
    if compact and any(row.diverged for row in board.rows):
        console.print(render.DIVERGED, style="dim", highlight=False, markup=False)
    for line in (render.floor_line(board), render.attack_line(board)):
        if line:
            console.print(line, highlight=False, markup=False)
    for line in render.divergence_lines(board):
        console.print(f"  diverged: {line}", style="yellow", highlight=False, markup=False)
    for line in render.inapplicable_lines(board):
        console.print(f"  {line}", style="dim", highlight=False, markup=False)
    for line in render.comparison_lines(board):
        console.print(f"  {line}", highlight=False, markup=False)
    if not board.complete:
        console.print(f"[yellow]Incomplete: {board.missing} records are missing.[/yellow]")
    if board.audits:
        console.print()
        print_audits(console, board.audits)


def print_audits(console: Any, tables: Sequence[AuditTable]) -> None:
    """Every audit: what it measures, its table, how to read it."""
    from benchmarks.audit_table import pieces, summary, table_rows
    from benchmarks.tables import rich_table

    for table in tables:
        heads, rows, lines = table_rows(table)
        console.print(f"[bold]{table.name}[/bold]: {summary(table)}", highlight=False)
        if len(heads) > 1:
            for piece in pieces(heads, rows, console.width):
                console.print(rich_table(None, *piece))
        for line in lines:
            console.print(line, style="dim", highlight=False, markup=False)
        console.print()


def print_places(console: Any, suite: ResolvedSuite, runtime: Runtime) -> None:
    """Where everything was written."""
    folder = _short_path(runtime.store / "suites" / suite.name)
    boards = _short_path(runtime.store / "tensorboard" / suite.name)
    console.print(
        f"\n[bold]Report[/bold]       {folder}/LEADERBOARD.md (.html, .csv, .json, .svg)",
        highlight=False,
    )
    console.print(f"[bold]Records[/bold]      {folder}/records.jsonl", highlight=False)
    console.print(f"[bold]TensorBoard[/bold]  tensorboard --logdir {boards}", highlight=False)


def _short_path(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
