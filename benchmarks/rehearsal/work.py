"""Runs a rehearsal row by row, so that a row that fails hides no other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from stable_forgetting.benchmarks.audits.plan import probe_plan
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.run import Lines
from stable_forgetting.benchmarks.leaderboard.write import write_report
from stable_forgetting.benchmarks.pipeline.context import SCALARS
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.schedule import run_suite
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.rehearsal.suite import WARNING, with_rows
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.resolved import config_of, described
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.errors import UserError, one_line
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

HEADS = ["row", "steps", "taken", "first rate", "last rate", "adapters", "precision", "s", ""]
OK, ABSENT = "ok", "not applicable: "
Planner = Callable[[ResolvedSuite, StageStore], Plan]
Rehearsed = dict[str, str]
"""What became of a row, or of what follows the rows: the cells under :data:`HEADS`."""


def rehearse(suite: ResolvedSuite, runtime: Runtime, executor: Executor) -> Iterator[Rehearsed]:
    """Trains, evaluates and probes each row, then audits all and writes the report.

    Args:
        suite: As :func:`benchmarks.rehearsal.suite.rehearsed` made it.
        runtime: Its store is the rehearsal's own.
    """
    store, good, watcher = StageStore(runtime.store), [], Lines(shown=False)

    def run(part: ResolvedSuite, planner: Planner = make_plan) -> Plan:
        made = run_suite(
            part, runtime, executor, watcher=watcher, planner=planner, live_events=False
        )
        if made.failed:
            raise RuntimeError(next(iter(made.failed.values())))
        return made.plan

    for row in sorted(suite.rows, key=lambda row: row.method not in REFERENCES):
        one = with_rows(suite, row.label)
        result = _timed(row.label, lambda row=row, one=one: _row(row, suite, run(one), store))  # type: ignore[misc]
        if result[""] == OK:
            good.append(row.label)
        yield result
    whole = with_rows(suite, *good)
    if suite.audits:
        yield _timed("audits", lambda: run(whole, probe_plan))
    written = partial(write_report, root=runtime.store, events=True)
    yield _timed("report", lambda: written(make_leaderboard(whole, store)))


def _timed(label: str, work: Callable[[], Any]) -> Rehearsed:
    """A line of the table: cells that some work gives, its seconds, and what went wrong."""
    started, cells = time.perf_counter(), {"row": label, "": OK}
    try:
        made = work()
        cells |= made if isinstance(made, dict) else {}
    except (UserError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        cells[""] = one_line(error)
    cells["s"] = f"{time.perf_counter() - started:.1f}"
    return {head: cells.get(head, "") for head in HEADS}


def _row(row: ResolvedRow, suite: ResolvedSuite, plan: Plan, store: StageStore) -> Rehearsed:
    """What the log and the files of a row's model say."""
    if row.label in plan.inapplicable:
        return {"": f"{ABSENT}{plan.inapplicable[row.label]}"}
    model: Stage = next(r.stage for r in plan.results if r.label == row.label).parents["model"]
    done, folder = store.done(model.kind, model.key) or {}, store.folder(model.kind, model.key)
    weights = getattr(getattr(suite.protocol, "model", None), "dtype", "float32")
    cells = {"precision": described(config_of(suite, row), weights)["trained in"]}
    log, adapter = folder / SCALARS, folder / "adapter.json"
    lines = map(json.loads, log.read_text("utf-8").splitlines() if log.is_file() else ())
    if rates := [line["lr"] for line in lines if "lr" in line]:
        cells |= {"steps": str(int(done["cost"]["steps"])), "taken": str(len(rates))}
        cells |= {"first rate": f"{rates[0]:.3g}", "last rate": f"{rates[-1]:.3g}"}
    if adapter.is_file():
        cells["adapters"] = str(len(json.loads(adapter.read_text())["layers"]))
    if done["status"] != "ok":
        cells[""] = done.get("status_detail", done["status"])
    return cells


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
