"""Runs a plan: stages go to an executor as soon as their parents are complete."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from stable_forgetting.benchmarks.pipeline.context import require_learnt
from stable_forgetting.benchmarks.pipeline.executors import WorkerPool
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.runner import BUSY, run_stage
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import Damaged, UserError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import KEY_LENGTH, StageStore

logger = logging.getLogger(__name__)
POLL = 0.5
"""Seconds between two looks at a stage on which another run works."""


class WorkerError(UserError):
    """A worker process was killed from outside."""


class Watcher(Protocol):
    """Receives what happens to stages, and counts what is done: :mod:`benchmarks.cli.progress`."""

    done: int

    def planned(self, plan: Plan, missing: Collection[str]) -> None:
        """A (re)plan, and the keys of its stages that are not there yet."""

    def started(self, stage: Stage) -> None:
        """A stage is handed to the executor."""

    def finished(self, stage: Stage, status: str) -> None:
        """A stage is complete (``ok`` or ``diverged``) or ``failed``."""


@dataclass
class Execution:
    """What became of a plan.

    Attributes:
        plan: The last one.
        failed: What failed in it.
        renewed: Whether the worker processes were replaced after the death of one.
    """

    plan: Plan
    failed: dict[str, str] = field(default_factory=dict)
    executed: int = 0
    renewed: bool = False


EVENTS = "tensorboard"
"""Where TensorBoard's files lie in a store."""
SEEDS = "seeds"
"""The folder of a suite's runs, one per row and seed."""


def events_folder(runtime: Runtime, suite: str, stage: Stage) -> Path | None:
    """TensorBoard folder of a stage, readable by people; None where its kind writes no events."""
    if not KINDS[stage.kind].events:
        return None
    return runtime.store / EVENTS / suite / SEEDS / Path(stage.name)


def run_suite(
    suite: ResolvedSuite,
    runtime: Runtime,
    executor: Executor,
    *,
    watcher: Watcher,
    live_events: bool = True,
    planner: Callable[[ResolvedSuite, StageStore], Plan] = make_plan,
) -> Execution:
    """Runs every stage that is not complete; replans while tuning is undecided.

    ``planner`` makes the plan of the suite as far as the store allows; ``live_events`` writes
    TensorBoard events while training.

    Raises:
        UserError: Something the user can mend; no further stage is started.
    """
    store = StageStore(runtime.store)
    store.sweep()
    execution = Execution(_planned(planner, suite, store))
    _require(execution.plan, store, runtime)
    while True:
        with _Round(execution, store, watcher) as work:
            while True:
                for stage in work.starting():
                    events = events_folder(runtime, suite.name, stage) if live_events else None
                    try:
                        task = executor.submit(run_stage, stage, runtime, events=events, wait=False)
                    except BrokenProcessPool:
                        work.lost = work.broken = True
                        break
                    work.running[task] = stage
                    if task.done():  # an executor that does not wait: report it before the next
                        break
                if not work.collected():
                    break
        if work.broken:
            _renew(execution, executor)
        execution.executed += work.count
        if not (work.lost or execution.plan.waiting):
            return execution
        known = {stage.key for stage in execution.plan.stages()}
        execution.plan = _planned(planner, suite, store)
        # another run may have done all that decides what follows
        more = any(stage.key not in known for stage in execution.plan.stages())
        if not (work.lost or work.count or more):
            return execution


def _renew(execution: Execution, executor: Executor) -> None:
    """New workers for the next round; a second loss is no accident."""
    if execution.renewed or not isinstance(executor, WorkerPool):
        raise WorkerError(
            "a worker process died (out of memory?); run again with fewer --workers: what is "
            "complete is kept"
        )
    executor.renew()
    execution.renewed = True
    logger.warning("a worker process died; its stage starts again in a new one")


def _require(plan: Plan, store: StageStore, runtime: Runtime) -> None:
    """Raises before the first training where a probe lacks its data or a method its package."""
    if plan.waiting or not all(_done(store, entry.stage) for entry in plan.probes):
        for entry in plan.suite.probes.values():
            entry.probe.require(runtime.data_root)
    for stage in plan.stages():
        method = getattr(stage.spec, "method", None)
        if method is not None and not _done(store, stage):
            METHODS[method].info.require(method)


def _planned(
    planner: Callable[[ResolvedSuite, StageStore], Plan], suite: ResolvedSuite, store: StageStore
) -> Plan:
    """A plan; what planning finds damaged is planned anew."""
    while True:
        try:
            return planner(suite, store)
        except Damaged as error:
            if not error.set_aside:
                raise
            logger.warning("%s", error)


class _Round:
    """One pass over the stages of a plan.

    Attributes:
        count: Stages that were run.
        lost: Whether a stored stage was damaged and set aside, or a worker process died; the next
            round makes it again.
        broken: Whether a worker process died.
    """

    def __init__(self, execution: Execution, store: StageStore, watcher: Watcher):
        self.execution, self.store, self.watcher = execution, store, watcher
        missing = {s.key: s for s in execution.plan.stages() if _done(store, s) is None}
        watcher.planned(execution.plan, missing)
        self.starts = {s.start.key for s in execution.plan.stages() if s.start is not None}
        for stage in execution.plan.stages():
            self._require_learnt(stage)
        self.todo = {key: s for key, s in missing.items() if key not in execution.failed}
        self.running: dict[Future[str], Stage] = {}
        self.elsewhere: dict[str, float] = {}
        self.count, self.lost, self.broken = 0, False, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for task in self.running:  # none is left but after an error
            task.cancel()

    def collected(self) -> bool:
        """Waits until something ends that runs here or elsewhere; False where nothing runs."""
        if not self.running and (self.lost or not self.elsewhere):
            return False
        finished, _ = wait(self.running, POLL if self.elsewhere else None, FIRST_COMPLETED)
        if not self.running:
            time.sleep(POLL)
        for future in finished:
            self._collect(future)
        return True

    def starting(self) -> Iterator[Stage]:
        """The stages that can start, but those that another run completed."""
        for stage in () if self.lost else self._ready():
            del self.todo[stage.key]
            if self.elsewhere.pop(stage.key, None) is not None:
                done = _done(self.store, stage)
                if done is not None:
                    self.watcher.finished(stage, str(done["status"]))
                    yield from self.starting()  # what waited for it may be ready
                    return
            self.watcher.started(stage)
            yield stage

    def _ready(self) -> list[Stage]:
        """Long trainings first: they are what everything else waits for."""
        now = time.monotonic()
        blocked = {s.key for s in [*self.todo.values(), *self.running.values()]}
        blocked |= self.execution.failed.keys()
        ready = [
            stage
            for stage in self.todo.values()
            if self.elsewhere.get(stage.key, 0.0) <= now
            and not any(parent.key in blocked for parent in stage.ancestors())
        ]
        return sorted(ready, key=lambda stage: KINDS[stage.kind].order)

    def _collect(self, future: Future[str]) -> None:
        stage = self.running.pop(future)
        try:
            status = future.result()
        except Damaged as error:
            if not error.set_aside:
                raise
            logger.warning("%s", error)
            self.lost = True
            return
        except UserError:
            if all(_done(self.store, parent) for parent in stage.parents.values()):
                raise
            self.lost = True  # a parent was set aside meanwhile
            return
        except BrokenProcessPool:
            self.lost = self.broken = True
            return
        except Exception as error:
            status = "failed"
            self.execution.failed[stage.key] = f"{stage.name}: {type(error).__name__}: {error}"
            self._log_failure(stage, error)
            if processes.count() > 1:
                raise  # the others wait inside the stage: the launcher must end them
        else:
            if status == BUSY:
                self.todo[stage.key] = stage
                self.elsewhere[stage.key] = time.monotonic() + POLL
                return
            self._forget_failure(stage)
        self.count += 1
        self.watcher.finished(stage, status)
        self._require_learnt(stage)

    def _require_learnt(self, stage: Stage) -> None:
        """Ends a run at once where an Original has learnt nothing that a method could unlearn."""
        if stage.kind == "original" and stage.key in self.starts:
            done = _done(self.store, stage) or {}
            status = done.get("status")  # what lacks a fact is refused by the stages that read it
            if status == "diverged" or (status == "ok" and "train_accuracy" in done):
                minimum = stage.spec.protocol.get("minimum_train_accuracy", 0.0)
                require_learnt(stage, done, minimum)

    def _log_failure(self, stage: Stage, error: Exception) -> None:
        path = self._failure_log(stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(traceback.format_exception(error))
        path.write_text(f"{stage.name}\n{text}", encoding="utf-8")

    def _forget_failure(self, stage: Stage) -> None:
        """Removes its log, and those of the same name under other keys: of code that is mended."""
        self._failure_log(stage).unlink(missing_ok=True)
        for log in (self.store.root / "failed").glob(f"{stage.kind}-*.log"):
            with log.open(encoding="utf-8", errors="replace") as lines:
                same = lines.readline().rstrip("\n") == stage.name
            if same:
                log.unlink(missing_ok=True)

    def _failure_log(self, stage: Stage) -> Path:
        name = f"{stage.kind}-{stage.key[:KEY_LENGTH]}"
        name += "" if processes.is_main() else f"-process-{processes.index()}"
        return self.store.root / "failed" / f"{name}.log"


def _done(store: StageStore, stage: Stage) -> dict[str, Any] | None:
    """What a stage says of itself; a damaged one is not done."""
    try:
        return store.done(stage.kind, stage.key)
    except Damaged as error:
        if not error.set_aside:
            raise
        logger.warning("%s", error)
        return None
