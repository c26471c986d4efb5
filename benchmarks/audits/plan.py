"""Which stages an audit needs: probes of stored models, and shadow trainings with their cost.

Torch-free: the cost is printed before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, product
from typing import Any, Literal

from stable_forgetting.benchmarks.pipeline.lineage import Lineage, attacked
from stable_forgetting.benchmarks.pipeline.planner import plan_rows
from stable_forgetting.benchmarks.pipeline.stage import Placed, Plan, Result, Stage
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES, Suite
from stable_forgetting.common.audits.base import Audit, ModelAudit, PopulationAudit
from stable_forgetting.common.audits.sequential import Sequential
from stable_forgetting.common.audits.twins import Twins
from stable_forgetting.common.base.config import Strict, validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore

Design = Literal["fixed", "halves"]


@dataclass(frozen=True)
class Shadows:
    """Which shadow models are wanted.

    Attributes:
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


@dataclass
class AuditPlan:
    """The stages that a report of audits reads.

    Attributes:
        results: Every evaluated model of the suite.
        probes: Audit -> its stage of every final model.
        retrains: Seed -> further Retrains that are in the store and did not diverge.
        shadows: Row label, seed and design -> the same of the row's shadows.
        streams: Row label and seed -> the model after each request.
        twins: Row label, seed, moved or not -> its twin, None while it is undecided.
    """

    results: Sequence[Result[Any]]
    probes: Mapping[str, Sequence[Result[Any]]]
    retrains: Mapping[int, Sequence[Placed]] = field(default_factory=dict)
    shadows: Mapping[tuple[str, int, Design], Sequence[Placed]] = field(default_factory=dict)
    streams: Mapping[tuple[str, int], Sequence[Placed]] = field(default_factory=dict)
    twins: Mapping[tuple[str, int, bool], Placed | None] = field(default_factory=dict)


def inapplicable(suite: ResolvedSuite, audit: Audit) -> str | None:
    """Why an audit has no meaning for a suite, as far as the config alone says."""
    benchmark = BENCHMARKS[suite.spec.benchmark]
    return audit.info.inapplicable(benchmark.scenario_of(suite.protocol))


def composite(suite: ResolvedSuite, label: str) -> str | None:
    """Why a row has no weights or layers of its own to look at, and nothing starts from it."""
    models = METHODS[suite.row(label).method].info.models
    return f"{models} models at inference" if models > 1 else None


def usable(store: StageStore, stage: Placed) -> bool:
    """Whether a stage is complete and did not diverge."""
    done = store.done(stage.kind, stage.key)
    return done is not None and done["status"] == "ok"


class AuditPlanner:
    """What audits need of one suite: probes of its models, and shadows beside them."""

    def __init__(self, suite: ResolvedSuite, store: StageStore):
        self.suite, self.store = suite, store
        self.lineage = Lineage(suite, store)
        self.base: Plan = plan_rows(self.lineage)
        self.rows = [row for row in suite.rows if row.label not in self.base.inapplicable]

    def finals(self) -> list[Result[Stage]]:
        """The suite's evaluated models that are in the store and did not diverge."""
        results = self.base.results
        return [r for r in results if r.trial is None and usable(self.store, r.stage)]

    def probe(self, result: Result, name: str, audit: ModelAudit) -> Stage:
        """The stage of a model audit on one evaluated model."""
        model, replicate = result.stage.parents["model"], result.replicate
        return attacked(self.lineage, model, result.seed, name, audit, replicate=replicate)

    def probes(self, audits: Mapping[str, Audit]) -> dict[str, list[Result[Stage]]]:
        """Audit -> its stage of every final model, done or not."""
        return {
            name: [
                replace(result, stage=self.probe(result, name, audit))
                for result in self.base.results
                if result.trial is None and composite(self.suite, result.label) is None
            ]
            for name, audit in audits.items()
            if isinstance(audit, ModelAudit) and inapplicable(self.suite, audit) is None
        }

    def probe_plan(self, audits: Mapping[str, Audit]) -> Plan:
        """Those of the models that are in the store and did not diverge."""
        there = {(r.label, r.seed, r.replicate) for r in self.finals()}
        results = chain.from_iterable(self.probes(audits).values())
        chosen = [r for r in results if (r.label, r.seed, r.replicate) in there]
        return Plan(self.suite, chosen)

    def report_plan(self, audits: Mapping[str, Audit], shadows: Shadows | None = None) -> AuditPlan:
        """What a report of audits reads; of shadows those wanted, or all that are in the store."""
        plan = AuditPlan(self.base.results, self.probes(audits))
        seeds, rows = self.suite.spec.seeds, self.rows
        if any(isinstance(audit, PopulationAudit) for audit in audits.values()):
            limit = 2 * shadows.count if shadows else None
            plan.retrains = {
                seed: self._stored(partial(self.retrain_shadow, seed), limit) for seed in seeds
            }
            designs: tuple[Design, ...] = ("fixed", "halves")
            plan.shadows = {
                (row.label, seed, design): self._stored_shadows(row, seed, design, shadows)
                for row, seed, design in product(rows, seeds, designs)
                if row.method != "retrain"
            }
        for audit in audits.values():
            if isinstance(audit, Sequential):
                streams = self._streams(audit.config.requests)
                plan.streams = {place: stages or [] for place, stages in streams.items()}
            elif isinstance(audit, Twins):
                plan.twins = {**plan.twins, **self._twins(moved=audit.moved)}
        return plan

    def _stored_shadows(
        self, row: ResolvedRow, seed: int, design: Design, shadows: Shadows | None
    ) -> list[Stage]:
        limit = shadows.count if shadows else None
        originals = shadows.originals if shadows and design == "fixed" else None
        if originals and limit and not METHODS[row.method].info.changes_model:
            limit = min(limit, originals)
        make = partial(self.shadow, row, seed, design=design, originals=originals)
        return self._stored(make, limit)

    def _stored(self, make: Callable[[int], Stage | None], limit: int | None) -> list[Stage]:
        """Stages 0, 1, ... that are in the store and did not diverge, up to the first missing."""
        stages: list[Stage] = []
        for index in count(0) if limit is None else range(limit):
            stage = make(index)
            if stage is None or self.lineage.done(stage) is None:
                break
            if usable(self.store, stage):
                stages.append(stage)
        return stages

    def check_trainable(self) -> None:
        """Raises ConfigError where further models cannot be trained as the suite's were."""
        name = self.suite.name
        if self.suite.after is not None:
            raise ConfigError(
                f"{name}: starts from the suite {self.suite.after.name}, and shadows start from "
                "Original; audit that one, or leave out --shadows"
            )
        for seed in self.suite.spec.seeds:
            if (self.lineage.done(self.lineage.original(seed)) or {}).get("published"):
                raise ConfigError(
                    f"{name}: its Original is a published checkpoint, and shadows need trainings "
                    "of their own; leave out --shadows"
                )

    def config_of(self, row: ResolvedRow) -> Strict | None:
        """The row's final config; None while its tuning is undecided."""
        if row.search is None:
            return row.config
        chosen = self.base.chosen.get(row.label)
        return None if chosen is None else self.base.draws[row.label][chosen].config

    def shadow(
        self, row: ResolvedRow, seed: int, index: int, design: Design, originals: int | None = None
    ) -> Stage | None:
        """The evaluated model of one shadow; None while the row's config is undecided.

        In the ``fixed`` design shadow 0 is the suite's own model.
        """
        config, lineage = self.config_of(row), self.lineage
        if config is None:
            return None
        if design == "fixed":
            split = None
            original = lineage.original(seed, index % originals if originals else index)
        else:
            split = lineage.split(seed, half=index)
            original = lineage.original(seed, index, split)
        if not METHODS[row.method].info.changes_model:
            return lineage.evaluated(original, seed, index, split=split)
        own = design == "fixed" and index == 0
        model = lineage.unlearned(
            row,
            config,
            seed,
            start=None if own else original,
            split=split,
            replicate=None if own else index,
            note="" if own else f"{design}-{index}/seed-{seed}",
        )
        return lineage.evaluated(model, seed, index, split=split)

    def retrain_shadow(self, seed: int, index: int) -> Stage:
        """The evaluated model of a further Retrain; the first ones are the suite's own."""
        return self.lineage.evaluated(self.lineage.retrain(seed, index), seed, index)

    def shadow_plan(self, shadows: Shadows) -> Plan:
        """All shadows of every row and seed, Retrains included, as one plan."""
        plan, seeds = Plan(self.suite), self.suite.spec.seeds
        for seed, row in product(seeds, [r for r in self.rows if r.method != "retrain"]):
            changes = METHODS[row.method].info.changes_model
            numbers = range(shadows.count if changes else shadows.originals or shadows.count)
            made = [self.shadow(row, seed, k, shadows.design, shadows.originals) for k in numbers]
            _add(plan, row.label, seed, None if None in made else made)
        for seed in seeds if shadows.design == "fixed" else ():
            made = [self.retrain_shadow(seed, k) for k in range(2 * shadows.count)]
            _add(plan, "retrain", seed, made)
        return plan

    # Twins, the stages of the audits that train a row again ---------------------------------------

    def twin_plan(self, *, moved: bool) -> Plan:
        """A twin of every model that a method made; see :meth:`twin`."""
        plan = Plan(self.suite)
        for (label, seed, _), stage in self._twins(moved=moved).items():
            _add(plan, label, seed, None if stage is None else [stage])
        return plan

    def _twins(self, *, moved: bool) -> dict[tuple[str, int, bool], Stage | None]:
        rows = [row for row in self.rows if row.method not in REFERENCES]
        places = product(rows, self.suite.spec.seeds)
        return {(r.label, s, moved): self.twin(r, s, moved=moved) for r, s in places}

    def twin(self, row: ResolvedRow, seed: int, *, moved: bool) -> Stage | None:
        """The evaluated model of the same Original, with moved last digits or another seed."""
        config, lineage = self.config_of(row), self.lineage
        if config is None:
            return None
        number, note = (None, "moved") if moved else (1, "again")
        note += f"/seed-{seed}"
        model = lineage.unlearned(row, config, seed, replicate=number, moved=moved, note=note)
        return lineage.evaluated(model, seed, number or 0)

    # Streams of forget requests: the stages of the ``sequential`` audit ---------------------------

    def stream_plan(self, requests: int) -> Plan:
        """The streams of every row and seed, and of as many Retrains as give a floor."""
        plan = Plan(self.suite)
        for (label, seed), stages in self._streams(requests).items():
            if label != FLOOR or self.suite.spec.retrains > 1:
                _add(plan, label, seed, stages)
        return plan

    def _streams(self, requests: int) -> dict[tuple[str, int], list[Stage] | None]:
        rows = [(row, row.label, 0) for row in self.rows]
        rows += [(row, FLOOR, 1) for row in self.rows if row.method == "retrain"]
        return {
            (label, seed): self.stream(row, seed, requests, replicate)
            for row, label, replicate in rows
            for seed in self.suite.spec.seeds
        }

    def stream(
        self, row: ResolvedRow, seed: int, requests: int, replicate: int = 0
    ) -> list[Stage] | None:
        """The evaluated models after each request; None while the row's config is undecided.

        The forget set is divided into so many requests.  Retrain is trained anew for every request
        but the last, whose retain set is the suite's; a ``replicate`` of it gives the noise floor.
        A row of several models at inference has no stages: no later request can start from it.
        """
        if composite(self.suite, row.label) is not None:
            return []
        config, lineage = self.config_of(row), self.lineage
        if config is None:
            return None
        model, stages = lineage.original(seed), []
        for index in range(requests):
            split = lineage.split(seed, request=(index, requests))
            if row.method == "retrain":
                last = index == requests - 1
                model = lineage.retrain(seed, replicate, None if last else split)
            elif METHODS[row.method].info.changes_model:
                model = lineage.unlearned(
                    row, config, seed, start=model, split=split, note=split.name
                )
            stages.append(lineage.evaluated(model, seed, replicate, split=split))
        return stages


def _add(plan: Plan, label: str, seed: int, stages: Sequence[Stage | None] | None) -> None:
    """Adds a row's stages to a plan; a row that has none yet waits."""
    if stages is None:
        plan.waiting.append(label)
    for number, stage in enumerate(stages or ()):
        if stage is not None:
            plan.results.append(Result(label, seed, number, None, stage))


def probe_plan(suite: ResolvedSuite, store: StageStore) -> Plan:
    """What the suite's own audits need of the models that are in the store."""
    return AuditPlanner(suite, store).probe_plan(suite.audits)


def suite_of_record(record: RunRecord) -> ResolvedSuite:
    """The smallest suite that holds a record's run: Original, two Retrains, its row.

    Its stages have the very keys of the suite that made the record.
    """
    if record.trial:
        raise ConfigError("this record is a tuning trial, which keeps no scores; audit its suite")
    names = dict.fromkeys([*REFERENCES, record.method])
    params = {record.method: record.params}
    spec = Suite(
        suite=f"record-{record.stages.get('measure', record.method)[:8]}",
        benchmark=record.benchmark,
        protocol=record.protocol,
        seeds=(record.seed,),
        methods=dict.fromkeys(names),
    )
    protocol = validate(BENCHMARKS[record.benchmark].Config, record.protocol, "record: protocol")
    rows = tuple(
        ResolvedRow(name, name, validate(METHODS[name].Config, params.get(name, {}), "record"))
        for name in names
    )
    return ResolvedSuite(spec, protocol, rows)
