"""The plan of a suite as it lies beside the records: all that a report knows of stages.

It is written once per suite, by whoever asks first, and read by every report.  It is made anew only
where it is of another suite or code, where tuning or a grid was not decided yet, or where the store
has Retrains of further seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from stable_forgetting.benchmarks.audits.plan import AuditPlanner
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Block, Placed, Probed, Result
from stable_forgetting.benchmarks.suite.remembered import suite_digest
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import canonical, digest
from stable_forgetting.common.base.files import write_text
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.store.stages import ENGINE_VERSION, StageStore

FILE = "plan.json"


@dataclass(frozen=True)
class Stored:
    """A stage as the file has it: where its files lie, and what it was made of."""

    kind: str
    key: str
    parents: Mapping[str, Placed]


def _note(stage: Placed, info: Any) -> str:
    """A stage is its key; what the key stands for is noted once, parents first."""
    if stage.key not in info.context:
        parents = {role: _note(parent, info) for role, parent in stage.parents.items()}
        info.context[stage.key] = [stage.kind, parents]
    return stage.key


ByKey = Annotated[
    Placed, PlainValidator(lambda key, info: info.context[key]), PlainSerializer(_note)
]


@dataclass
class StoredPlan:
    """What a report knows of a suite's stages.

    Attributes:
        state: Digest of all that the plan follows from.
        results: Every evaluated model, in table order, trials too.
        audits: Results of the suite's own audits, with an audit's name for a label; row by model.
        trials: Tuned row -> values and config of every trial.
        chosen: Row -> the trial that was chosen.
        waiting: Evaluated models that are not planned yet: tuning or a grid is not decided.
        inapplicable: Rows whose method is not for this benchmark -> why.
        pooled: Evaluated reference models of every seed in the store.
        folds: Those of the folds before the last.
    """

    state: str
    results: list[Result[ByKey]]
    probes: list[Probed[ByKey]]
    audits: dict[str, list[Result[ByKey]]]
    trials: dict[str, list[dict[str, Any]]]
    chosen: dict[str, int]
    waiting: int
    inapplicable: dict[str, str]
    blocks: list[Block[ByKey]]
    folds: list[StoredPlan]
    pooled: list[Result[ByKey]] = field(default_factory=list)

    def text(self) -> str:
        """The file's text: every stage once, and everything else by key."""
        stages: dict[str, Any] = {}
        plan = _PLANS.dump_python(self, mode="json", context=stages)
        return json.dumps({"stages": stages, "plan": plan}, allow_nan=False) + "\n"


_PLANS = TypeAdapter(StoredPlan)


def stored_plan(suite: ResolvedSuite, store: StageStore) -> StoredPlan:
    """The plan beside a suite's records; made and written first where there is none of today.

    Nothing is written for a suite that was never run in this store.
    """
    path = store.root / "suites" / suite.name / FILE
    found = {done["seed"] for done in store.complete("retrain") if done.get("seed") is not None}
    seeds = sorted({*found, *suite.spec.seeds})  # of the suite, and of every Retrain there
    state = digest([_state(suite), seeds])
    with suppress(OSError, ValueError, LookupError, TypeError):
        plan = _read(path, state)
        if plan is not None:
            return plan
    plan = _made(suite, store, state)
    plan.pooled = _pooled(suite, store, seeds)
    if path.parent.is_dir() and processes.is_main():
        with suppress(OSError):  # a store that cannot be written is read all the same
            write_text(path, plan.text())
    return plan


def _state(suite: ResolvedSuite) -> Any:
    """All that the keys of a suite's stages follow from, but the store."""
    spec, methods = suite.spec, {row.method for row in suite.rows}
    attack = spec.tune.after_attack if spec.tune else None
    return {
        "suite": suite_digest(suite),
        "rehearsal": canonical(suite.rehearsal),
        "engine": ENGINE_VERSION,
        "benchmark": str(BENCHMARKS[spec.benchmark].versions),
        "methods": {name: METHODS[name].info.version for name in sorted(methods)},
        "probes": {name: entry.probe.version for name, entry in suite.probes.items()},
        "audits": {name: audit.info.version for name, audit in suite.audits.items()},
        "after_attack": AUDITS[attack].info.version if attack else None,
        "kinds": {kind.name: KINDS[kind.name].version for kind in KINDS},
    }


def _made(suite: ResolvedSuite, store: StageStore, state: str) -> StoredPlan:
    planner = AuditPlanner(suite, store)
    plan = planner.base
    trials = {
        label: [{"values": dict(draw.values), "config": canonical(draw.config)} for draw in draws]
        for label, draws in plan.draws.items()
    }
    return StoredPlan(
        state,
        [*plan.results],
        [*plan.probes],
        {name: [*results] for name, results in planner.probes(suite.audits).items()},
        trials,
        plan.chosen,
        len(plan.waiting) * len(suite.spec.seeds) + plan.undrawn,
        plan.inapplicable,
        [*plan.blocks],
        [_made(fold, store, state) for fold in suite.folds],
    )


def _pooled(suite: ResolvedSuite, store: StageStore, seeds: list[int]) -> list[Result[Placed]]:
    """The evaluated reference models of more seeds than the suite's."""
    spec = suite.spec.model_copy(update={"seeds": tuple(seeds)})
    rows = tuple(row for row in suite.rows if row.method in REFERENCES)
    references = replace(suite, spec=spec, rows=rows, probes={}, folds=())
    return [*make_plan(references, store).results]


def _read(path: Path, state: str) -> StoredPlan | None:
    """The plan of a file; None where it is not of ``state``, or not decided."""
    content = json.loads(path.read_text("utf-8"))
    if content["plan"]["state"] != state or content["plan"]["waiting"]:
        return None
    stages: dict[str, Stored] = {}
    for key, (kind, parents) in content["stages"].items():
        stages[key] = Stored(kind, key, {role: stages[p] for role, p in parents.items()})
    return _PLANS.validate_python(content["plan"], context=stages)
