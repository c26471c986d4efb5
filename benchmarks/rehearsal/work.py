"""Runs a rehearsal row by row, so that a row that fails hides no other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from stable_forgetting.benchmarks.audits.plan import probe_plan
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.run import Lines
from stable_forgetting.benchmarks.leaderboard.write import write_report
from stable_forgetting.benchmarks.pipeline.context import SCALARS
from stable_forgetting.benchmarks.pipeline.schedule import Execution, run_suite
from stable_forgetting.benchmarks.pipeline.stage import Stage
from stable_forgetting.benchmarks.rehearsal.suite import WARNING, with_rows
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.resolved import described
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.errors import UserError, one_line
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

HEADS = ["row", "steps", "taken", "first rate", "last rate", "adapters", "precision", "s", ""]
OK, ABSENT = "ok", "not applicable: "
Rehearsed = dict[str, str]
"""What became of a row, or of what follows the rows: the cells under :data:`HEADS`."""


def rehearse(suite: ResolvedSuite, runtime: Runtime, executor: Executor) -> Iterator[Rehearsed]:
    """Trains, evaluates and probes each row, then audits all and writes the report.

    Args:
        suite: As :func:`benchmarks.rehearsal.suite.rehearsed` made it.
        runtime: Its store is the rehearsal's own.
        executor: Runs the stages.
    """
    watcher = Lines(shown=False)
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
        if result[""] == OK:
            good.append(row.label)
        yield result
    whole = with_rows(suite, *good)
    if suite.audits:
        audits = _Timed(
            lambda: run_suite(
                whole, runtime, executor, watcher=watcher, planner=probe_plan, live_events=False
            )
        )
        yield audits.row("audits")
    report = _Timed(
        lambda: write_report(make_leaderboard(whole, store), runtime.store, events=True)
    )
    yield report.row("report")


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

    def row(self, label: str, end: str = OK, **cells: str) -> Rehearsed:
        """A line of the table, whose last cell is what went wrong, or ``end``."""
        known = {"row": label, "s": f"{self.seconds:.1f}", "": self.error or end, **cells}
        return {head: known.get(head, "") for head in HEADS}


def _row(row: ResolvedRow, suite: ResolvedSuite, work: _Timed, store: StageStore) -> Rehearsed:
    if work.error or work.result is None:
        return work.row(row.label)
    plan = work.result.plan
    if row.label in plan.inapplicable:
        return work.row(row.label, f"{ABSENT}{plan.inapplicable[row.label]}")
    model: Stage = next(r.stage for r in plan.results if r.label == row.label).parents["model"]
    done = store.done(model.kind, model.key) or {}
    reference = row.method in REFERENCES
    config: Any = getattr(suite.protocol, "train", None) if reference else row.config
    weights = getattr(getattr(suite.protocol, "model", None), "dtype", "float32")
    folder = store.folder(model.kind, model.key)
    cells = {"precision": described(config, weights)["trained in"]}
    if steps := _steps(folder / SCALARS):
        cells |= {"steps": str(int(done["cost"]["steps"])), "taken": str(len(steps))}
        cells |= {"first rate": f"{steps[0][1]:.3g}", "last rate": f"{steps[-1][1]:.3g}"}
    if (adapter := folder / "adapter.json").is_file():
        cells["adapters"] = str(len(json.loads(adapter.read_text())["layers"]))
    ended = OK if done["status"] == "ok" else done.get("status_detail", done["status"])
    return work.row(row.label, ended, **cells)


def _steps(path: Any) -> list[tuple[int, float]]:
    """(number, rate) of each optimizer step that was logged."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["lr"]) for line in lines if "lr" in line]


def failed(row: Rehearsed) -> bool:
    """Whether a row went wrong; one that does not apply did not."""
    return row[""] != OK and not row[""].startswith(ABSENT)


def section(name: str, rows: Sequence[Rehearsed], notes: Sequence[str]) -> Section:
    """One line per row; ``ok``, or what went wrong."""
    absent = sum(row[""].startswith(ABSENT) for row in rows)
    good = sum(row[""] == OK for row in rows)
    seconds = sum(float(row["s"]) for row in rows)
    words = f"{good} of {len(rows)} went well, in {seconds:.0f} s."
    words += f" {absent} do not apply." if absent else ""
    cells = [[*row.values()] for row in rows]
    return Section(f"{name} ({WARNING})", (*notes, words), table(HEADS, cells, words=True))
