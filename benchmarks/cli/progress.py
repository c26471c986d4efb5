"""Progress of a run: stages, the trainings under way with step and loss, and the time left."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.audits.cost import group, length, seconds_of
from stable_forgetting.benchmarks.leaderboard.live import under_way
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.position import Pace, Position
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.report.cells import duration
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import Damaged
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.common.train.protocols import Progress

WIDE = 100
"""Characters from which a bar is long and has the time so far beside it."""
LOOK = 1.0
"""Seconds between two looks at the trainings."""
PATIENCE = 600.0
"""Seconds after which lines off a terminal come half as often as at first."""
TRAINED = "of all trainings"
PRETRAIN = "pretrain"
SHORT = 0.1
"""Of the shortest training: what a stage that trains nothing takes as long as none was seen."""


class Display:
    """A :class:`benchmarks.pipeline.schedule.Watcher`.

    On a terminal (``console`` is Rich's) it shows bars, elsewhere a line every ``every`` seconds at
    first.
    """

    def __init__(
        self, console: Any, title: str, store: StageStore, workers: int = 1, every: float = 20.0
    ):
        self._console, self._title, self._every = console, title, every
        self._store, self._remaining = store, Remaining(store, workers)
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._running: dict[str, tuple[Stage, float]] = {}
        self._began, self._started, self._spoke = time.time(), time.monotonic(), time.monotonic()
        self._last = ""
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.total = self.done = 0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._bars = _bars(self._console)
            self._bars.start()
            self._tasks[""] = self._bars.add_task(self._title, total=None, note="")
        if processes.is_main():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._bars is not None:
            self._bars.stop()

    def planned(self, plan: Plan, missing: Collection[str]) -> None:
        """Shows the size of a plan, and how much of it is stored."""
        with self._lock:
            self._remaining.planned(plan, missing)
            self.total = sum(1 for _ in plan.stages())
            self.done = self.total - len(missing)
            if self._bars is None:
                self._say(f"{self.total} stages, {self.done} of them already in the store")
            self._look()

    def started(self, stage: Stage) -> None:
        """Watches a stage, whether it runs already or waits for a worker."""
        with self._lock:
            self._running[stage.key] = stage, time.time()

    def finished(self, stage: Stage, status: str) -> None:
        """Shows one more stage, and one that failed or diverged by name."""
        note = stage.name if status == "ok" else f"{stage.name}: {status}"
        with self._lock:
            self.done += 1
            self._last = f"{stage.kind} {note}"
            self._running.pop(stage.key, None)
            self._remaining.finished(stage)
            if status == "failed" or (status != "ok" and KINDS[stage.kind].trains):
                self._console.print(f"  {note}")
            self._look()

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            with self._lock:
                self._look()

    def _look(self) -> None:
        """Shows where the trainings are."""
        now, stages = time.monotonic(), [stage for stage, _ in self._running.values()]
        under = under_way(stages, self._store, self._began)
        positions = {stage.key: at for stage, at in under}
        spent = {key: time.time() - began for key, (_, began) in self._running.items()}
        running = {key: (spent[key], at.left) for key, at in positions.items()}
        left = words(self._remaining.seconds(running))
        if self._bars is None:
            patience = 1 + (now - self._started) / PATIENCE
            if now - self._spoke > self._every * patience or self.done == self.total:
                trainings = [self._training(key, at) for key, at in positions.items()]
                last = f"last: {self._last}" if self._last else "starting workers, loading data"
                left = "" if self.done == self.total else left
                parts = [left, *trainings] if trainings else [left, last]
                self._say(", ".join([f"{self.done}/{self.total} stages", *filter(None, parts)]))
            return
        self._bars.update(self._tasks[""], total=self.total, completed=self.done, note=left)
        for key in [*self._tasks]:
            if key and key not in positions:
                self._bars.remove_task(self._tasks.pop(key))
        for key, at in positions.items():
            if key not in self._tasks:
                name = f"  {self._running[key][0].name}"
                self._tasks[key] = self._bars.add_task(name, note="")
            note = f"loss {number(at.loss)}"
            self._bars.update(self._tasks[key], total=at.total, completed=at.step, note=note)
        self._bars.refresh()

    def _training(self, key: str, at: Position) -> str:
        return f"{self._running[key][0].name} step {at.step}/{at.total} loss {number(at.loss)}"

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        elapsed = self._spoke - self._started
        self._console.print(f"{self._title}: [{elapsed:5.0f} s] {text}", markup=False)


class StepBar:
    """One training's steps, loss and time left, on rank 0: a bar, or a line now and then."""

    def __init__(self, console: Any, title: str, every: float = 20.0):
        self._console, self._title, self._every = console, title, every
        self._bars: Any = None
        self._task: Any = None
        self._spoke, self._pace = time.monotonic(), Pace()

    def __enter__(self) -> Progress | None:
        if not processes.is_main():
            return None
        if not self._console.is_terminal:
            return self._line
        self._bars = _bars(self._console)
        self._bars.start()
        self._task = self._bars.add_task(self._title, total=None, note="")
        return self._bar

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _bar(self, step: int, total: int, loss: float) -> None:
        note = self._note(step, total, loss)
        self._bars.update(self._task, completed=step, total=total, note=note)

    def _line(self, step: int, total: int, loss: float) -> None:
        note = self._note(step, total, loss)
        if self._pace.now - self._spoke > self._every:
            self._spoke = self._pace.now
            text = f"{self._title}: step {step}/{total} {note}"
            self._console.print(text, markup=False)

    def _note(self, step: int, total: int, loss: float) -> str:
        left = words(self._pace.at(step, total, loss).left)
        return " ".join(filter(None, [f"loss {number(loss)}", left]))


def number(loss: float) -> str:
    """A loss with three digits; a dash before the first."""
    return "–" if math.isnan(loss) else f"{loss:.3g}"


def _bars(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    wide = console.width >= WIDE
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20 if wide else 6),
        MofNCompleteColumn(),
        *([TimeElapsedColumn()] if wide else []),
        TextColumn("{task.fields[note]}", markup=False, style="dim"),
        console=console,
        transient=True,
    )


# The time left ------------------------------------------------------------------------------------


class Remaining:
    """Seconds until a plan is complete, shared by the workers.

    A stage is expected to take what others of its group (``unlearn gd_sine``) in the store took,
    else what trainings took per epoch or step, else others of its kind.
    """

    def __init__(self, store: StageStore, workers: int):
        self._store, self._workers = store, workers
        self._missing: dict[str, Stage] = {}
        self._took: dict[str, list[float]] = defaultdict(list)
        self._unplanned = 0

    def planned(self, plan: Plan, missing: Collection[str]) -> None:
        """Takes a plan over: what is complete says how long it took."""
        self._unplanned = plan.undrawn + len(plan.waiting) * len(plan.suite.spec.seeds)
        self._missing, self._took = {}, defaultdict(list)
        for stage in plan.stages():
            if stage.key in missing:
                self._missing[stage.key] = stage
            else:
                self.finished(stage)

    def finished(self, stage: Stage) -> None:
        """One stage is through."""
        self._missing.pop(stage.key, None)
        with contextlib.suppress(Damaged):  # whoever needs the stage finds out
            seconds = seconds_of(self._store, stage)
            if seconds is not None:
                for name, scale in _groups(stage).items():
                    self._took[name].append(seconds / scale)

    def seconds(self, running: Mapping[str, tuple[float, float | None]]) -> float | None:
        """Seconds to go; None where nothing is known yet.

        Args:
            running: Key of a stage -> seconds so far, and seconds left of its training.
        """
        known = dict(self._took)
        for key, (spent, left) in running.items():
            if left is not None and key in self._missing:
                for name, scale in _groups(self._missing[key]).items():
                    known.setdefault(name, [(spent + left) / scale])
        if not known.get(TRAINED) and any(KINDS[s.kind].trains for s in self._missing.values()):
            return None
        short = SHORT * min(known.get(TRAINED, [0.0]))
        total = self._unplanned * _mean(known.get("unlearn") or known.get(TRAINED, []))
        for key, stage in self._missing.items():
            spent, left = running.get(key, (0.0, None))
            scales = _groups(stage).items()
            expected = next((n * _mean(known[name]) for name, n in scales if name in known), short)
            total += max(0.0, expected - spent) if left is None else left
        return total / self._workers


def _groups(stage: Stage) -> dict[str, int]:
    """Names under which a stage's seconds are known, the nearest first -> their unit in it."""
    if stage.kind == PRETRAIN:  # on other data: it tells nothing of the others
        return {stage.kind: 1}
    count, unit = length(stage)
    of_unit = {unit: max(1, count)} if unit else {}
    trained = {TRAINED: 1} if KINDS[stage.kind].trains else {}
    return {group(stage): 1, **of_unit, stage.kind: 1, **trained}


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def words(seconds: float | None) -> str:
    """``~4 min left``, in steps that do not flicker; empty where nothing is known."""
    if seconds is None:
        return ""
    step = 5 if seconds < 100 else 60 if seconds < 3600 else 360
    return f"~{duration(max(step, step * round(seconds / step)))} left"
