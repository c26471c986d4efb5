"""Suite -> stages.  Pure and torch-free: ``unlearn plan`` answers at once.

Everything that a number depends on is in a stage's identity or in its parents' keys.  Rows that
are tuned resolve in steps: their trials first, round after round where the sampler looks at the
rounds before, then, once all trials' records exist, the chosen config.  Drawing and choosing are
pure functions of those records and are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.pipeline.stage import Kind, Plan, Result, Stage
from benchmarks.spec.resolve import ResolvedRow, ResolvedSuite
from benchmarks.spec.suite import REFERENCES
from common.base.config import Strict, canonical
from common.base.registry import BENCHMARKS, METHODS
from common.measure.gaps import average_gap
from common.measure.metric import GapRule
from common.store.records import RunRecord
from common.store.stages import StageStore


class Planner:
    """Builds the stages of one suite.

    Args:
        suite: A resolved suite.
        store: Where trials' records may already be.
    """

    def __init__(self, suite: ResolvedSuite, store: StageStore):
        self.suite, self.store = suite, store
        self._benchmark = BENCHMARKS[suite.spec.benchmark]
        self._about = {"benchmark": suite.spec.benchmark, "version": self._benchmark.version}
        self._cache: dict[Any, Stage] = {}
        self._before = Planner(suite.after, store) if suite.after else None

    def plan(self) -> Plan:
        """Every row for every seed; trials first where a row is tuned."""
        plan = Plan(self.suite)
        for row in self.suite.rows:
            if row.method in REFERENCES:
                self._add_final(plan, row, row.config)
        for row in self.suite.rows:
            if row.method in REFERENCES:
                continue
            reason = self._inapplicable(row)
            if reason is not None:
                plan.inapplicable[row.label] = reason
                continue
            config: Strict | None = row.config
            if row.search:
                config = self._tuned(plan, row)
            if config is not None:
                self._add_final(plan, row, config)
        return plan

    def _inapplicable(self, row: ResolvedRow) -> str | None:
        return METHODS[row.method].info.inapplicable(
            scenario=self._benchmark.scenario_of(self.suite.protocol),
            modality=self._benchmark.modality,
        )

    def _tuned(self, plan: Plan, row: ResolvedRow) -> Strict | None:
        """The chosen config; None while trials are missing."""
        assert row.search is not None
        for seed in row.search.tune.seeds:
            reference = self._evaluate(self._retrain(seed, 0), seed, 0, trial=True)
            if not any(r.stage.key == reference.key for r in plan.results):
                plan.results.append(Result("retrain", seed, 0, -1, reference))
        draws = plan.draws[row.label] = list(row.draws)
        gaps: list[float] = []
        while len(gaps) < len(draws):
            start = len(gaps)
            stages = [
                self._trial(plan, row, draw.config, start + index)
                for index, draw in enumerate(draws[start:])
            ]
            known = [gap for per_seed in stages if (gap := self._gap(per_seed)) is not None]
            if len(known) < len(stages):
                plan.waiting.append(row.label)
                return None
            gaps += known
            draws += row.search.more(draws, gaps)
        best = min(range(len(gaps)), key=gaps.__getitem__)
        plan.chosen[row.label] = best
        return draws[best].config

    def _trial(self, plan: Plan, row: ResolvedRow, config: Strict, index: int) -> dict[int, Stage]:
        """Seed -> evaluate stage of one trial."""
        assert row.search is not None
        stages = {
            seed: self._evaluate(self._unlearn(row, config, seed, index), seed, 0, trial=True)
            for seed in row.search.tune.seeds
        }
        plan.results += [Result(row.label, s, 0, index, stage) for s, stage in stages.items()]
        return stages

    def _gap(self, stages: Mapping[int, Stage]) -> float | None:
        """Sum of a trial's validation gaps over its seeds; None while one is missing."""
        total = 0.0
        for seed, stage in stages.items():
            record = self.record(stage)
            target = self.record(self._evaluate(self._retrain(seed, 0), seed, 0, trial=True))
            if record is None or target is None:
                return None
            total += trial_gap(record, target, self._benchmark.gap)
        return total

    def record(self, stage: Stage) -> RunRecord | None:
        """The record of an evaluate stage, if it is done."""
        if self.store.done(stage.kind, stage.key) is None:
            return None
        return RunRecord.load(self.store.folder(stage.kind, stage.key) / "record.json")

    def _add_final(self, plan: Plan, row: ResolvedRow, config: Strict) -> None:
        for seed in self.suite.spec.seeds:
            replicates = self.suite.spec.retrains if row.method == "retrain" else 1
            for replicate in range(replicates):
                if row.method == "original":
                    model = self._original(seed)
                elif row.method == "retrain":
                    model = self._retrain(seed, replicate)
                else:
                    model = self._unlearn(row, config, seed)
                stage = self._evaluate(model, seed, replicate, trial=False)
                plan.results.append(Result(row.label, seed, replicate, None, stage))

    def _stage(
        self,
        kind: Kind,
        name: str,
        identity: Mapping[str, Any],
        parents: Mapping[str, Stage],
        **spec: Any,
    ) -> Stage:
        stage = Stage(
            kind,
            {
                "benchmark": self.suite.spec.benchmark,
                "protocol": canonical(self.suite.protocol),
                **spec,
            },
            _numbers({**self._about, **identity}),
            parents,
            name,
        )
        return self._cache.setdefault(stage.key, stage)

    def _config_identity(self, kind: str) -> dict[str, Any]:
        return {"config": canonical(self._benchmark.identity(self.suite.protocol, kind))}

    def _split(self, seed: int) -> Stage:
        return self._stage(
            "split",
            f"split/seed-{seed}",
            {**self._config_identity("split"), "seed": seed},
            {},
            seed=seed,
        )

    def _original(self, seed: int) -> Stage:
        return self._stage(
            "original",
            f"original/seed-{seed}",
            {**self._config_identity("train"), "seed": seed},
            {},
            seed=seed,
        )

    def _retrain(self, seed: int, replicate: int) -> Stage:
        version = METHODS["retrain"].info.version
        identity = {
            **self._config_identity("train"),
            "seed": seed,
            "replicate": replicate,
            "method_version": version,
        }
        return self._stage(
            "retrain",
            f"retrain-{replicate + 1}/seed-{seed}" if replicate else f"retrain/seed-{seed}",
            identity,
            {"split": self._split(seed)},
            seed=seed,
            replicate=replicate,
        )

    def _start(self, row: ResolvedRow, seed: int) -> Stage:
        """The model that a row unlearns: Original, or what the request before left."""
        if self._before is None:
            return self._original(seed)
        before = self._before.suite.row(row.label)
        return self._before._unlearn(before, before.config, seed)

    def _unlearn(
        self, row: ResolvedRow, config: Strict, seed: int, trial: int | None = None
    ) -> Stage:
        cls = METHODS[row.method]
        params = canonical(config)
        identity = {
            "method": row.method,
            "method_version": cls.info.version,
            "params": params,
            "seed": seed,
        }
        parents = {"split": self._split(seed), "original": self._start(row, seed)}
        return self._stage(
            "unlearn",
            f"{row.label}/seed-{seed}" + ("" if trial is None else f"/trial-{trial}"),
            identity,
            parents,
            seed=seed,
            method=row.method,
            params=params,
        )

    def _evaluate(self, model: Stage, seed: int, replicate: int, *, trial: bool) -> Stage:
        method = {"original": "original", "retrain": "retrain"}.get(model.kind)
        identity = {**self._config_identity("evaluate"), "trial": trial}
        parents = {"model": model, "split": self._split(seed)}
        return self._stage(
            "evaluate",
            model.name + ("/trial" if trial else ""),
            identity,
            parents,
            seed=seed,
            replicate=replicate,
            trial=trial,
            method=method or model.spec["method"],
            params=model.spec.get("params", {}),
        )


def _numbers(value: Any) -> Any:
    """An identity without what no number depends on: how often checkpoints are written."""
    if isinstance(value, Mapping):
        return {k: _numbers(v) for k, v in value.items() if k != "checkpoint_every"}
    return value


def trial_gap(record: RunRecord, target: RunRecord, rule: GapRule) -> float:
    """Mean |gap| to Retrain over the rule's trial metrics; infinite if it diverged."""
    if record.status != "ok":
        return math.inf
    gap = average_gap(record.metrics, target.metrics, metrics=rule.trial)
    return math.inf if gap is None else gap


def make_plan(suite: ResolvedSuite, store: StageStore) -> Plan:
    """The plan as far as the store allows."""
    return Planner(suite, store).plan()
