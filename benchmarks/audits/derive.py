"""Stored scores and audit stages -> one table per audit, always beside Retrain against Retrain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from stable_forgetting.benchmarks.audits.plan import AuditPlan, composite, inapplicable, usable
from stable_forgetting.benchmarks.pipeline.measuring import read_attack, read_scores
from stable_forgetting.benchmarks.pipeline.stage import Placed, Result
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.common.audits.attacks import ULira
from stable_forgetting.common.audits.base import (
    Audit,
    Measure,
    Measures,
    ModelAudit,
    NotApplicable,
    PairAudit,
    PopulationAudit,
    TooFew,
)
from stable_forgetting.common.audits.sequential import Sequential
from stable_forgetting.common.audits.twins import Twins, UnlearningSeed
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.gaps import summarise
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

NO_SECOND = "no second Retrain in the store: set retrains: 2"
Cell = Measures | str
"""What an audit measured for one row and seed, or why it measured nothing."""


@dataclass
class AuditTable:
    """One audit of a suite.

    Attributes:
        rows: Row label -> seed -> measures or a reason; the noise floor is a row.
        seconds: What the attack took on each model, where it ran on models.
    """

    name: str
    audit: Audit
    rows: dict[str, dict[int, Cell]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def put(self, label: str, seed: int, work: Callable[[], Measures]) -> None:
        """Notes what ``work`` measures, or the reason why it measures nothing."""
        try:
            self.rows.setdefault(label, {})[seed] = work()
        except NotApplicable as error:
            self.rows.setdefault(label, {})[seed] = error.reason
        except Diverged as error:
            self.rows.setdefault(label, {})[seed] = str(error)

    def relate(self, retrain: str) -> None:
        """Adds to every row's measures what they are beside those of the seed's Retrain."""
        assert isinstance(self.audit, ModelAudit)
        targets = self.rows.get(retrain, {})
        for label, cells in self.rows.items():
            for seed, cell in cells.items():
                target = targets.get(seed)
                if label != retrain and isinstance(cell, dict) and isinstance(target, dict):
                    cells[seed] = {**cell, **self.audit.relate(cell, target)}

    @property
    def columns(self) -> list[str]:
        """Measures in the order in which they first appear."""
        names: dict[str, None] = {}
        for row in self.rows.values():
            for cell in row.values():
                names |= dict.fromkeys(cell if isinstance(cell, dict) else ())
        return list(names)

    def summary(self, label: str, column: str) -> Measure | None:
        """A row's measure over its seeds: its own interval for one seed, else a t-interval.

        Seeds where it is undefined are left out and counted in the note.
        """
        cells = [cell for cell in self.rows[label].values() if isinstance(cell, dict)]
        measures = [cell[column] for cell in cells if column in cell]
        defined = [measure for measure in measures if measure.value is not None]
        if len(measures) == 1 or not defined:
            return measures[0] if measures else None
        first = defined[0]
        values = [measure.value for measure in defined if measure.value is not None]
        over = summarise(values)
        notes = [measure.note for measure in measures if measure.note]
        if undefined := len(measures) - len(defined):
            notes.append(f"undefined for {undefined} of {len(measures)} seeds")
        interval = f"95 % t over {len(values)} seeds" if len(values) > 1 else first.interval
        low, high = (over.low, over.high) if len(values) > 1 else (first.low, first.high)
        text = "; ".join(dict.fromkeys(notes))
        low, high = first.clipped(low), first.clipped(high)
        return Measure(over.mean, low, high, interval, first.n, text, first.bounds)


class AuditReport:
    """The tables of a suite's audits, from the stored stages of a plan; plans and runs nothing."""

    def __init__(
        self, suite: ResolvedSuite, store: StageStore, audits: Mapping[str, Audit], plan: AuditPlan
    ):
        self.suite, self.store, self.audits, self.plan = suite, store, audits, plan
        self.benchmark = BENCHMARKS[suite.spec.benchmark]
        self.retrain = suite.retrain
        self._loaded: dict[str, dict[str, Any]] = {}

    @cached_property
    def finals(self) -> list[Result[Any]]:
        """The suite's evaluated models that did not diverge."""
        return [r for r in self.plan.results if r.trial is None and usable(self.store, r.stage)]

    def tables(self) -> list[AuditTable]:
        """One table per audit."""
        tables = []
        for name, audit in self.audits.items():
            table = AuditTable(name, audit)
            audit.parts = self.benchmark.part_table
            reason = inapplicable(self.suite, audit)
            if reason is not None:
                text = NotApplicable(reason).reason
                table.rows = {row: dict.fromkeys(self.retrains, text) for row in self.rows}
            elif isinstance(audit, PairAudit):
                self._pairs(table, audit)
            elif isinstance(audit, PopulationAudit):
                self._populations(table, audit)
            elif isinstance(audit, Sequential):
                self._streams(table, audit)
            elif isinstance(audit, Twins):
                self._twins(table, audit)
            else:
                assert isinstance(audit, ModelAudit)
                self._models(table)
            tables.append(table)
        return tables

    # The models ----------------------------------------------------------------------------------

    def scores(self, stage: Placed) -> dict[str, Any]:
        """Part -> stored scores of an evaluate stage."""
        if stage.key not in self._loaded:
            choices = self.benchmark.choices
            self._loaded[stage.key] = {
                part: replace(scores, probs=choices(scores))
                for part, scores in read_scores(self.store, stage).items()
            }
        return self._loaded[stage.key]

    def _of(self, label: str, replicate: int = 0) -> dict[int, Result]:
        return {r.seed: r for r in self.finals if (r.label, r.replicate) == (label, replicate)}

    @cached_property
    def retrains(self) -> dict[int, Result]:
        """Seed -> the Retrain beside which the rows are read."""
        return self._of(self.retrain)

    @cached_property
    def rows(self) -> dict[str, dict[int, Result]]:
        """The noise floor and the rows with results, without Retrain: label -> seed -> model."""
        labels = [row.label for row in self.suite.rows if row.label != self.retrain]
        rows = {label: own for label in labels if (own := self._of(label))}
        return {FLOOR: self._of(self.retrain, 1), **rows}

    def _pairs(self, table: AuditTable, audit: PairAudit) -> None:
        for label, results in self.rows.items():
            for seed, retrain in self.retrains.items():
                if seed in results:
                    ours, theirs = (self.scores(r.stage) for r in (results[seed], retrain))
                    table.put(label, seed, partial(audit.compare, ours, theirs, seed=seed))
                elif label == FLOOR:
                    table.rows.setdefault(FLOOR, {})[seed] = NO_SECOND

    # Model audits --------------------------------------------------------------------------------

    def _models(self, table: AuditTable) -> None:
        for label, results in {self.retrain: self.retrains, **self.rows}.items():
            for seed, result in results.items():
                table.rows.setdefault(label, {})[seed] = self._probe(result, table)
        table.relate(self.retrain)
        if FLOOR not in table.rows:
            table.rows[FLOOR] = dict.fromkeys(self.retrains, NO_SECOND)

    @cached_property
    def _probes(self) -> dict[tuple[str, str, int, int], Placed]:
        return {
            (name, result.label, result.seed, result.replicate): result.stage
            for name, results in self.plan.probes.items()
            for result in results
        }

    def _probe(self, result: Result[Any], table: AuditTable) -> Cell:
        reason = composite(self.suite, result.label)
        if reason is not None:
            return reason
        stage = self._probes[table.name, result.label, result.seed, result.replicate]
        cell, done = read_attack(self.store, stage), self.store.done(stage.kind, stage.key)
        if cell is None or done is None:
            return "not run"
        table.seconds.append(float(done.get("stage_seconds", 0.0)))
        return cell

    # Populations ---------------------------------------------------------------------------------

    def _populations(self, table: AuditTable, audit: PopulationAudit) -> None:
        for seeds in self._seed_groups():
            pool = _interleaved([self.plan.retrains[seed] for seed in seeds])
            half = len(pool) // 2
            rows = {FLOOR: pool[half:]}
            rows |= {
                label: _interleaved([self.plan.shadows[label, seed, "fixed"] for seed in seeds])
                for label in self.rows
                if label != FLOOR
            }
            for label, models in rows.items():
                n = min(len(models), half)
                ours, theirs = ([self.scores(s) for s in side[:n]] for side in (models, pool))
                table.put(label, seeds[0], partial(audit.compare, ours, theirs, seed=seeds[0]))
        if isinstance(audit, ULira):
            self._halves(table, audit)

    def _seed_groups(self) -> list[list[int]]:
        """Seeds that share one split: their models are one population."""
        groups: dict[str, list[int]] = {}
        for seed, result in self.retrains.items():
            split = result.stage.parents["split"]
            done = self.store.done(split.kind, split.key)
            groups.setdefault((done or {}).get("split", split.key), []).append(seed)
        return list(groups.values())

    def _halves(self, table: AuditTable, audit: ULira) -> None:
        for (label, seed, design), stages in self.plan.shadows.items():
            if design == "halves" and stages and seed in self.retrains:
                models = [self.scores(stage) for stage in stages]
                table.put(f"{label}, halves", seed, partial(audit.halves, models, seed=seed))

    # Twins ---------------------------------------------------------------------------------------

    def _twins(self, table: AuditTable, audit: Twins) -> None:
        if isinstance(audit, UnlearningSeed):
            benchmark = self.benchmark(self.suite.protocol, Runtime(store=self.store.root))
            audit.evaluate = lambda scores, seed: benchmark.redrawn(scores, seed=seed)
            audit.titles = {spec.name: spec.title for spec in self.benchmark.metrics}
        for label in dict.fromkeys(label for label, *_ in self.plan.twins):
            own, twins = {}, {}
            cells: dict[int, Cell] = {}
            for seed in self.suite.spec.seeds:
                stage = self.plan.twins[label, seed, audit.moved]
                cells[seed] = self._no_twin(table.name, label, seed, stage)
                if stage is not None and not cells[seed]:
                    own[seed] = self.scores(self.rows[label][seed].stage)
                    twins[seed] = self.scores(stage)
            if own:
                try:
                    cells |= audit.compare(own, twins)
                except TooFew as error:
                    cells |= {next(iter(own)): error.reason}
            table.rows[label] = {seed: cell for seed, cell in cells.items() if cell}

    def _no_twin(self, name: str, label: str, seed: int, stage: Placed | None) -> str:
        """Why a model cannot be compared with its twin; empty where it can."""
        if stage is None:
            return "its tuning is not finished"
        done = self.store.done(stage.kind, stage.key)
        if done is None:
            return f"not run: add --attacks {name} --yes"
        if done["status"] != "ok":
            return f"diverged: {done.get('status_detail', '')}"
        return "" if seed in self.rows.get(label, {}) else "not run"

    # Streams -------------------------------------------------------------------------------------

    def _streams(self, table: AuditTable, audit: Sequential) -> None:
        for (label, seed), stages in self.plan.streams.items():
            row = self.retrain if label == FLOOR else label
            cell = composite(self.suite, row) or self._stream(audit, stages)
            table.rows.setdefault(label, {})[seed] = cell

    def _stream(self, audit: Sequential, stages: Sequence[Placed]) -> Cell:
        measures: Measures = {}
        for index, stage in enumerate(stages):
            done = self.store.done(stage.kind, stage.key)
            if done is None:
                return "not run: add --attacks sequential --yes"
            if done["status"] != "ok":
                return f"diverged at request {index + 1}: {done.get('status_detail', '')}"
            measures |= audit.after(index, self.scores(stage))
        return measures or "its tuning is not finished"


def _interleaved(lists: Sequence[Sequence[Placed]]) -> list[Placed]:
    """First of each, then second of each, and so on."""
    return [item for items in zip_longest(*lists) for item in items if item is not None]
