"""The plan of a suite as it lies beside the records: all that a report knows of stages.

It is written once per suite, by whoever asks first, and read by every report.  It is made anew only
where it is of another suite or code, where tuning or a grid was not decided yet, or where the store
has Retrains of further seeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.audits.plan import AuditPlanner
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Block, Placed, Plan, Probed, Result
from stable_forgetting.benchmarks.suite.remembered import suite_digest
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import canonical, digest
from stable_forgetting.common.base.files import write_text
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.store.stages import ENGINE_VERSION, StageStore

FILE = "plan.json"


@dataclass(frozen=True)
class Stored:
    """A stage as a report sees it: where its files lie, and what it was made of."""

    kind: str
    key: str
    parents: Mapping[str, Stored]


@dataclass
class StoredPlan:
    """What a report knows of a suite's stages.

    Attributes:
        state: Digest of all that the plan follows from.
        results: Every evaluated model, in table order, trials too.
        audits: Results of the suite's own audits, with an audit's name for a label; row by model.
        trials: Tuned row -> values and config of every trial.
        chosen: Row -> the trial that was chosen.
        waiting: Evaluated models that are not planned yet, because tuning or a grid is not
            decided.
        inapplicable: Rows whose method is not for this benchmark -> why.
        pooled: Evaluated reference models of every seed in the store.
        folds: Those of the folds before the last.
        blocks: Of the suite's grid.
    """

    state: str
    results: list[Result[Stored]]
    probes: list[Probed[Stored]]
    audits: dict[str, list[Result[Stored]]]
    trials: dict[str, list[dict[str, Any]]]
    chosen: dict[str, int]
    waiting: int
    inapplicable: dict[str, str]
    pooled: list[Result[Stored]] = field(default_factory=list)
    folds: list[StoredPlan] = field(default_factory=list)
    blocks: list[Block[Stored]] = field(default_factory=list)

    def text(self) -> str:
        """The file's text: every stage once, and everything else by key."""
        stages: dict[str, Any] = {}
        _note(stages, self._placed())
        return json.dumps({"stages": stages, "plan": _plain(self)}, allow_nan=False) + "\n"

    def _placed(self) -> Iterator[Stored]:
        for fold in self.folds:
            yield from fold._placed()
        for results in (self.results, self.pooled, *self.audits.values()):
            yield from (result.stage for result in results)
        yield from (entry.stage for entry in self.probes)
        yield from (block.stage for block in self.blocks)


def stored_plan(suite: ResolvedSuite, store: StageStore) -> StoredPlan:
    """The plan beside a suite's records; made and written first where there is none of today.

    Nothing is written for a suite that was never run in this store.
    """
    path, seeds = store.root / "suites" / suite.name / FILE, _seeds(suite, store)
    state = digest([_state(suite), seeds])
    with suppress(OSError, ValueError, LookupError, TypeError):
        plan = _read(path, state)
        if plan is not None:
            return plan
    plan = _made(suite, store, state)
    plan.pooled = _pooled(suite, store, seeds)
    if path.parent.is_dir() and processes.is_main():
        with suppress(PermissionError):  # a store that cannot be written is read all the same
            write_text(path, plan.text())
    return plan


# Making -------------------------------------------------------------------------------------------


def _seeds(suite: ResolvedSuite, store: StageStore) -> list[int]:
    """Seeds of the suite, and of every Retrain in the store."""
    found = {done["seed"] for done in store.complete("retrain") if done.get("seed") is not None}
    return sorted({*found, *suite.spec.seeds})


def _state(suite: ResolvedSuite) -> Any:
    """All that the keys of a suite's stages follow from, but the store."""
    spec, methods = suite.spec, {row.method for row in suite.rows}
    return {
        "suite": suite_digest(suite),
        "rehearsal": canonical(suite.rehearsal),
        "engine": ENGINE_VERSION,
        "benchmark": str(BENCHMARKS[spec.benchmark].versions),
        "methods": {name: METHODS[name].info.version for name in sorted(methods)},
        "probes": {name: entry.probe.version for name, entry in suite.probes.items()},
        "audits": {name: audit.info.version for name, audit in suite.audits.items()},
    }


def _made(suite: ResolvedSuite, store: StageStore, state: str) -> StoredPlan:
    planner = AuditPlanner(suite, store)
    plan = _of(planner.base, state)
    plan.audits = {
        name: [_stored(result) for result in results]
        for name, results in planner.probes(suite.audits).items()
    }
    plan.folds = [_made(fold, store, state) for fold in suite.folds]
    return plan


def _pooled(suite: ResolvedSuite, store: StageStore, seeds: list[int]) -> list[Result[Stored]]:
    """The evaluated reference models of more seeds than the suite's."""
    spec = suite.spec.model_copy(update={"seeds": tuple(seeds)})
    rows = tuple(row for row in suite.rows if row.method in REFERENCES)
    references = replace(suite, spec=spec, rows=rows, probes={}, folds=())
    return [_stored(result) for result in make_plan(references, store).results]


def _stored(result: Result[Any]) -> Result[Stored]:
    return Result(result.label, result.seed, result.replicate, result.trial, stored(result.stage))


def stored(stage: Placed) -> Stored:
    """A stage as a report sees it."""
    return Stored(stage.kind, stage.key, {role: stored(p) for role, p in stage.parents.items()})


def _of(plan: Plan, state: str) -> StoredPlan:
    trials = {
        label: [{"values": dict(draw.values), "config": canonical(draw.config)} for draw in draws]
        for label, draws in plan.draws.items()
    }
    results = {id(result): _stored(result) for result in plan.results}
    return StoredPlan(
        state,
        list(results.values()),
        [Probed(results[id(e.result)], e.name, stored(e.stage)) for e in plan.probes],
        {},
        trials,
        dict(plan.chosen),
        len(plan.waiting) * len(plan.suite.spec.seeds) + plan.undrawn,
        dict(plan.inapplicable),
        blocks=[Block(b.label, b.seed, b.lrs, b.extension, stored(b.stage)) for b in plan.blocks],
    )


# Files --------------------------------------------------------------------------------------------


def _note(stages: dict[str, Any], placed: Iterable[Stored]) -> None:
    for stage in placed:
        if stage.key not in stages:
            _note(stages, stage.parents.values())
            parents = {role: parent.key for role, parent in stage.parents.items()}
            stages[stage.key] = [stage.kind, parents]


def _plain(plan: StoredPlan) -> dict[str, Any]:
    return {
        **vars(plan),
        "results": [_line(result) for result in plan.results],
        "pooled": [_line(result) for result in plan.pooled],
        "probes": [[*_line(e.result), e.name, e.stage.key] for e in plan.probes],
        "audits": {name: [_line(r) for r in results] for name, results in plan.audits.items()},
        "folds": [_plain(fold) for fold in plan.folds],
        "blocks": [{**vars(block), "stage": block.stage.key} for block in plan.blocks],
    }


def _line(result: Result[Stored]) -> list[Any]:
    return [result.label, result.seed, result.replicate, result.trial, result.stage.key]


def _read(path: Path, state: str) -> StoredPlan | None:
    """The plan of a file; None where it is not of ``state``, or not decided."""
    content = json.loads(path.read_text("utf-8"))
    if content["plan"]["state"] != state or content["plan"]["waiting"]:
        return None
    stages: dict[str, Stored] = {}
    for key, (kind, parents) in content["stages"].items():
        stages[key] = Stored(kind, key, {role: stages[p] for role, p in parents.items()})
    return _parsed(content["plan"], stages)


def _parsed(plan: dict[str, Any], stages: Mapping[str, Stored]) -> StoredPlan:
    def results(lines: Iterable[list[Any]]) -> list[Result[Stored]]:
        return [
            Result(label, seed, replicate, trial, stages[key])
            for label, seed, replicate, trial, key, *_ in lines
        ]

    probed = [
        Probed(result, line[5], stages[line[6]])
        for result, line in zip(results(plan["probes"]), plan["probes"], strict=True)
    ]
    return StoredPlan(
        **{
            **plan,
            "results": results(plan["results"]),
            "pooled": results(plan["pooled"]),
            "probes": probed,
            "audits": {name: results(lines) for name, lines in plan["audits"].items()},
            "folds": [_parsed(fold, stages) for fold in plan["folds"]],
            "blocks": [_block(line, stages) for line in plan["blocks"]],
        }
    )


def _block(line: dict[str, Any], stages: Mapping[str, Stored]) -> Block[Stored]:
    return Block(**{**line, "lrs": tuple(line["lrs"]), "stage": stages[line["stage"]]})
