"""Streams of forget requests: the stages of the ``sequential`` audit."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.audits.plan import AuditPlanner
from benchmarks.pipeline.stage import Plan, Result, Stage
from benchmarks.spec.resolve import ResolvedRow
from common.base.config import Strict
from common.base.registry import METHODS


class RequestPlanner(AuditPlanner):
    """Streams of forget requests on top of a suite's own stages."""

    def stream(
        self, row: ResolvedRow, seed: int, count: int, replicate: int = 0
    ) -> list[Stage] | None:
        """The evaluate stages after each request; None while the row's config is undecided.

        Retrain is trained anew for every request but the last, whose retain set is the suite's.
        """
        config = self.config_of(row)
        if config is None:
            return None
        model, stages = self._original(seed), []
        for index in range(count):
            split = self._request(seed, index, count)
            if row.method == "retrain":
                last = index == count - 1
                model = self._retrain_on(seed, replicate, self._split(seed) if last else split)
            elif METHODS[row.method].info.changes_model:
                model = self._unlearn_on(row, config, seed, index, split, model)
            stages.append(self._evaluated_on(model, split, seed, replicate))
        return stages

    def _request(self, seed: int, index: int, count: int) -> Stage:
        spec = {"seed": seed, "request": index, "requests": count}
        identity = {**self._config_identity("split"), **spec}
        name = f"request-{index + 1}-of-{count}/seed-{seed}"
        return self._stage("split", name, identity, {}, **spec)

    def _retrain_on(self, seed: int, replicate: int, split: Stage) -> Stage:
        usual = self._retrain(seed, replicate)
        if split.key == usual.parents["split"].key:
            return usual
        return self._cached(replace(usual, parents={"split": split}, name=f"retrain/{split.name}"))

    def _unlearn_on(
        self, row: ResolvedRow, config: Strict, seed: int, index: int, split: Stage, model: Stage
    ) -> Stage:
        usual = self._unlearn(row, config, seed)
        parents = {"split": split, "original": model}
        return self._cached(replace(usual, parents=parents, name=f"{row.label}/{split.name}"))

    def _cached(self, stage: Stage) -> Stage:
        return self._cache.setdefault(stage.key, stage)

    def stream_plan(self, count: int) -> Plan:
        """The streams of every row and seed, and of as many Retrains as give a floor."""
        plan = Plan(self.suite)
        for seed in self.suite.spec.seeds:
            for row in self.suite.rows:
                twice = row.method == "retrain" and self.suite.spec.retrains > 1
                for replicate in range(2 if twice else 1):
                    stages = self.stream(row, seed, count, replicate)
                    if stages is None:
                        plan.waiting.append(row.label)
                    for stage in stages or ():
                        plan.results.append(Result(row.label, seed, replicate, None, stage))
        return plan
