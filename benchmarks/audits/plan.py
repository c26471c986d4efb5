"""Which stages an audit needs: probes of stored models, and shadow trainings with their cost.

Torch-free: the cost is printed before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.pipeline.planner import Planner
from benchmarks.pipeline.stage import Plan, Result, Stage
from benchmarks.spec.resolve import ResolvedRow, ResolvedSuite
from benchmarks.spec.suite import REFERENCES, Suite
from common.audits.base import Audit, ModelAudit
from common.base.config import Strict, canonical, validate
from common.base.errors import ConfigError
from common.base.registry import BENCHMARKS, METHODS
from common.store.records import RunRecord
from common.store.stages import StageStore

Design = Literal["fixed", "halves"]
AUDIT_FILE = "audit.json"


@dataclass(frozen=True)
class Shadows:
    """Which shadow models are wanted.

    Attributes:
        count: Unlearned models per row and seed.
        design: ``fixed``: all forget the same set, beside twice as many Retrains (KLoM, epsilon,
            U-LiRA).  ``halves``: each trains on a random half of the forget set and unlearns it,
            the other half is never seen (U-LiRA, no further Retrain).
        originals: Different Originals under them; with fewer than ``count`` the unlearned models
            share them (adapters are then all that is trained and stored), and their spread is
            that of the method alone.
    """

    count: int
    design: Design = "fixed"
    originals: int | None = None


class AuditPlanner(Planner):
    """Builds audit stages and shadows on top of a suite's own stages."""

    def __init__(self, suite: ResolvedSuite, store: StageStore):
        super().__init__(suite, store)
        self.base: Plan = self.plan()

    def finals(self) -> Iterator[Result]:
        """The suite's evaluated models that are in the store and did not diverge."""
        for result in self.base.results:
            if result.trial is None and self.usable(result.stage):
                yield result

    def usable(self, stage: Stage) -> bool:
        """Whether a stage is complete and did not diverge."""
        done = self.store.done(stage.kind, stage.key)
        return done is not None and done["status"] == "ok"

    def probe(self, result: Result, name: str, audit: ModelAudit) -> Stage:
        """The stage of a model audit on one evaluated model."""
        config = canonical(audit.config)
        identity = {"audit": name, "audit_version": audit.info.version, "config": config}
        parents = {
            "model": result.stage.parents["model"],
            "split": result.stage.parents["split"],
            "original": self._original(result.seed),
        }
        return self._stage(
            "audit",
            f"{name}/{result.stage.name}",
            {**identity, "seed": result.seed},
            parents,
            seed=result.seed,
            audit=name,
            config=config,
        )

    def inapplicable(self, audit: Audit) -> str | None:
        """Why an audit has no meaning for this suite, as far as the config alone tells."""
        return audit.info.inapplicable(self._benchmark.scenario_of(self.suite.protocol))

    def probes(self, audits: Mapping[str, ModelAudit]) -> list[Result]:
        """Every probe of every stored model, as results of the audit's name."""
        return [
            Result(name, result.seed, result.replicate, None, self.probe(result, name, audit))
            for result in self.finals()
            for name, audit in audits.items()
            if self.inapplicable(audit) is None
        ]

    def complete(self, plan: Plan) -> bool:
        """Whether nothing of a plan is left to do."""
        return all(self.store.done(s.kind, s.key) is not None for s in plan.stages())

    def check_trainable(self) -> None:
        """Raises ConfigError where further models cannot be trained as the suite's were."""
        name = self.suite.name
        if self.suite.after is not None:
            raise ConfigError(
                f"{name}: starts from the suite {self.suite.after.name}, and shadows start from "
                "Original; audit that one, or leave out --shadows"
            )
        for seed in self.suite.spec.seeds:
            stage = self._original(seed)
            if (self.store.done(stage.kind, stage.key) or {}).get("published"):
                raise ConfigError(
                    f"{name}: its Original is a published checkpoint, and shadows need trainings "
                    "of their own; leave out --shadows"
                )

    # Shadows -------------------------------------------------------------------------------------

    def config_of(self, row: ResolvedRow) -> Strict | None:
        """The row's final config; None while its tuning is undecided."""
        if row.search is None:
            return row.config
        chosen = self.base.chosen.get(row.label)
        return None if chosen is None else self.base.draws[row.label][chosen].config

    def shadow(
        self, row: ResolvedRow, seed: int, index: int, design: Design, originals: int | None = None
    ) -> Stage | None:
        """The evaluate stage of one shadow; None while the row's config is undecided.

        In the ``fixed`` design shadow 0 is the suite's own model.
        """
        config = self.config_of(row)
        if config is None:
            return None
        under = index % originals if originals else index
        if design == "fixed":
            split, original = self._split(seed), self._original_shadow(seed, under)
        else:
            split = self._half(seed, index)
            original = self._original_half(seed, index, split)
        if not METHODS[row.method].info.changes_model:
            return self._evaluated_on(original, split, seed, index)
        if design == "fixed" and index == 0:
            return self._evaluate(self._unlearn(row, config, seed), seed, 0, trial=False)
        model = self._unlearn_shadow(row, config, seed, index, design, split, original)
        return self._evaluated_on(model, split, seed, index)

    def retrain_shadow(self, seed: int, index: int) -> Stage:
        """The evaluate stage of a further Retrain; the first ones are the suite's own."""
        return self._evaluate(self._retrain(seed, index), seed, index, trial=False)

    def _original_shadow(self, seed: int, index: int) -> Stage:
        if index == 0:
            return self._original(seed)
        identity = {**self._config_identity("train"), "seed": seed, "replicate": index}
        name = f"original-{index + 1}/seed-{seed}"
        return self._stage("original", name, identity, {}, seed=seed, replicate=index)

    def _half(self, seed: int, index: int) -> Stage:
        identity = {**self._config_identity("split"), "seed": seed, "half": index}
        name = f"half-{index}/seed-{seed}"
        return self._stage("split", name, identity, {}, seed=seed, half=index)

    def _original_half(self, seed: int, index: int, split: Stage) -> Stage:
        identity = {**self._config_identity("train"), "seed": seed, "replicate": index}
        name = f"original/half-{index}/seed-{seed}"
        return self._stage("original", name, identity, {"split": split}, seed=seed, replicate=index)

    def _unlearn_shadow(
        self,
        row: ResolvedRow,
        config: Strict,
        seed: int,
        index: int,
        design: Design,
        split: Stage,
        original: Stage,
    ) -> Stage:
        params = canonical(config)
        identity = {
            "method": row.method,
            "method_version": METHODS[row.method].info.version,
            "params": params,
            "seed": seed,
            "replicate": index,
        }
        return self._stage(
            "unlearn",
            f"{row.label}/{design}-{index}/seed-{seed}",
            identity,
            {"split": split, "original": original},
            seed=seed,
            replicate=index,
            method=row.method,
            params=params,
        )

    def _evaluated_on(self, model: Stage, split: Stage, seed: int, index: int) -> Stage:
        identity = {**self._config_identity("evaluate"), "trial": False}
        return self._stage(
            "evaluate",
            model.name,
            identity,
            {"model": model, "split": split},
            seed=seed,
            replicate=index,
            trial=False,
            method=model.spec.get("method", "original"),
            params=model.spec.get("params", {}),
        )

    def shadow_plan(self, shadows: Shadows) -> Plan:
        """All shadows of every row and seed, Retrains included, as one plan."""
        plan = Plan(self.suite)
        for seed in self.suite.spec.seeds:
            for row in self.suite.rows:
                if row.method != "retrain":
                    self._add_shadows(plan, row, seed, shadows)
            if shadows.design == "fixed":
                for index in range(2 * shadows.count):
                    stage = self.retrain_shadow(seed, index)
                    plan.results.append(Result("retrain", seed, index, None, stage))
        return plan

    def _add_shadows(self, plan: Plan, row: ResolvedRow, seed: int, shadows: Shadows) -> None:
        changes = METHODS[row.method].info.changes_model
        for index in range(shadows.count if changes else shadows.originals or shadows.count):
            stage = self.shadow(row, seed, index, shadows.design, shadows.originals)
            if stage is None:
                plan.waiting.append(row.label)
                return
            plan.results.append(Result(row.label, seed, index, None, stage))


def probe_plan(suite: ResolvedSuite, store: StageStore) -> Plan:
    """What the suite's own audits need of the models that are in the store."""
    audits = {name: a for name, a in suite.audits.items() if isinstance(a, ModelAudit)}
    return Plan(suite, AuditPlanner(suite, store).probes(audits))


def suite_of_record(record: RunRecord) -> ResolvedSuite:
    """The smallest suite that holds a record's run: Original, two Retrains, its row.

    Its stages have the very keys of the suite that made the record.
    """
    if record.trial:
        raise ConfigError("this record is a tuning trial, which keeps no scores; audit its suite")
    names = dict.fromkeys([*REFERENCES, record.method])
    params = {record.method: record.params}
    spec = Suite(
        suite=f"record-{record.stages.get('evaluate', record.method)[:8]}",
        benchmark=record.benchmark,
        protocol=record.protocol,
        seeds=(record.seed,),
        columns=(),
        methods=dict.fromkeys(names),
    )
    protocol = validate(BENCHMARKS[record.benchmark].Config, record.protocol, "record: protocol")
    rows = tuple(
        ResolvedRow(name, name, validate(METHODS[name].Config, params.get(name, {}), "record"))
        for name in names
    )
    return ResolvedSuite(spec, protocol, rows)
