"""Runs a rehearsal row by row, so that a row that fails hides no other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from stable_forgetting.benchmarks.audits.plan import probe_plan
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.write import write_report
from stable_forgetting.benchmarks.pipeline.schedule import Execution, run_suite
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.pipeline.worksite import SCALARS
from stable_forgetting.benchmarks.rehearsal.suite import with_rows
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.resolved import described
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.errors import UserError, one_line
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore


@dataclass(frozen=True)
class Rehearsed:
    """What became of a row, or of what follows the rows.

    Attributes:
        planned: Optimizer steps of the whole training; None where there is none.
        taken: Steps that were taken.
        rates: Learning rates of the first and of the last step.
        layers: Layers with an adapter.
        precision: What the training computes in.
        error: One line; empty where all went well.
        inapplicable: Why the suite has no such row; empty where it has.
    """

    label: str
    seconds: float
    planned: int | None = None
    taken: int = 0
    rates: tuple[float, ...] = ()
    layers: int = 0
    precision: str = ""
    error: str = ""
    inapplicable: str = ""


def rehearse(suite: ResolvedSuite, runtime: Runtime, executor: Executor) -> Iterator[Rehearsed]:
    """Trains, evaluates and probes each row, then audits all and writes the report.

    Args:
        suite: As :func:`benchmarks.rehearsal.suite.rehearsed` made it.
        runtime: Its store is the rehearsal's own.
        executor: Runs the stages.
    """
    watcher = _Silent()
    store, good = StageStore(runtime.store), []
    rows = sorted(suite.rows, key=lambda row: row.method not in REFERENCES)
    for row in rows:
        one = with_rows(suite, row.label)
        work = _Timed(
            lambda one=one: run_suite(  # type: ignore[misc]
                one, runtime, executor, watcher=watcher, live_events=False
            )
        )
        result = _row(row, suite, work, store)
        if not (result.error or result.inapplicable):
            good.append(row.label)
        yield result
    whole = with_rows(suite, *good)
    if suite.audits:
        audits = _Timed(
            lambda: run_suite(
                whole, runtime, executor, watcher=watcher, planner=probe_plan, live_events=False
            )
        )
        yield Rehearsed("audits", audits.seconds, error=audits.error)
    report = _Timed(
        lambda: write_report(make_leaderboard(whole, store), runtime.store, events=True)
    )
    yield Rehearsed("report", report.seconds, error=report.error)


class _Silent:
    """A watcher: rows are told of once they are through."""

    def planned(self, plan: Plan, missing: Collection[str]) -> None:
        """Says nothing."""

    def started(self, stage: Stage) -> None:
        """Says nothing."""

    def finished(self, stage: Stage, status: str) -> None:
        """Says nothing."""


class _Timed:
    """Does something; what goes wrong becomes one line."""

    def __init__(self, work: Callable[[], Any]):
        started = time.perf_counter()
        self.result, self.error = None, ""
        try:
            self.result = work()
        except (UserError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as e:
            self.error = one_line(e)
        if isinstance(self.result, Execution) and self.result.failed:
            self.error = " ".join(next(iter(self.result.failed.values())).split())
        self.seconds = time.perf_counter() - started


def _row(row: ResolvedRow, suite: ResolvedSuite, work: _Timed, store: StageStore) -> Rehearsed:
    if work.error or work.result is None:
        return Rehearsed(row.label, work.seconds, error=work.error)
    plan = work.result.plan
    if row.label in plan.inapplicable:
        reason = plan.inapplicable[row.label]
        return Rehearsed(row.label, work.seconds, inapplicable=reason)
    model: Stage = next(r.stage for r in plan.results if r.label == row.label).parents["model"]
    done = store.done(model.kind, model.key) or {}
    reference = row.method in REFERENCES
    config: Any = getattr(suite.protocol, "train", None) if reference else row.config
    weights = getattr(getattr(suite.protocol, "model", None), "dtype", "float32")
    folder = store.folder(model.kind, model.key)
    steps = _steps(folder / SCALARS)
    adapter = folder / "adapter.json"
    return Rehearsed(
        row.label,
        work.seconds,
        planned=int(done["cost"]["steps"]) if steps else None,
        taken=len(steps),
        rates=(steps[0][1], steps[-1][1]) if steps else (),
        layers=len(json.loads(adapter.read_text())["layers"]) if adapter.is_file() else 0,
        precision=described(config, weights)["trained in"],
        error="" if done["status"] == "ok" else done.get("status_detail", done["status"]),
    )


def _steps(path: Any) -> list[tuple[int, float]]:
    """(number, rate) of each optimizer step that was logged."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["lr"]) for line in lines if "lr" in line]
