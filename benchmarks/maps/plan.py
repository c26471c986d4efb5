"""Map -> stages.  A block of configs that share a forward is one stage; torch-free.

The references are stages of the suite, shared with its leaderboard.  Extensions of the grid resolve
like tuning does: their columns follow from the cells of the columns before them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stable_forgetting.benchmarks.maps.cells import Cell, Edge, Target, judge
from stable_forgetting.benchmarks.maps.resolve import GridRow, ResolvedMap
from stable_forgetting.benchmarks.maps.work import CELLS, MapBlock
from stable_forgetting.benchmarks.pipeline.lineage import Lineage
from stable_forgetting.benchmarks.pipeline.measuring import read_record, read_stored
from stable_forgetting.benchmarks.pipeline.planner import plan_rows
from stable_forgetting.benchmarks.pipeline.probing import read_table
from stable_forgetting.benchmarks.pipeline.stage import Plan, Result, Stage
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base.config import canonical
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.methods.base import UnlearningMethod
from stable_forgetting.common.methods.difference import GradientDifference
from stable_forgetting.common.methods.gradient import GradientMethod
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore

Point = tuple[float, float]
SIDES = ("low", "high")


@dataclass(frozen=True)
class Block:
    """Some points of one row and seed, done together."""

    row: GridRow
    seed: int
    points: tuple[Point, ...]
    extension: bool
    stage: Stage


@dataclass
class MapPlan(Plan):
    """The stages of a map, as far as the store decides them.

    Attributes:
        edges: Row -> side -> the edge there, as far as its cells decide it.
    """

    blocks: list[Block] = field(default_factory=list)
    edges: dict[str, dict[str, Edge]] = field(default_factory=dict)


def runs_together(cls: type[UnlearningMethod], config: Any) -> bool:
    """Whether :mod:`common.train.batched` does exactly what this method with this config does."""
    if not issubclass(cls, GradientDifference):
        return False
    body = ("unlearn", "prepare", "initialise", "loaders")
    own = any(getattr(cls, name) is not getattr(GradientMethod, name) for name in body)
    own |= cls.objective is not GradientDifference.objective
    adapter = config.adapter
    if own or adapter is None or adapter.dropout or adapter.train_head or adapter.trained:
        return False
    if PHIS[adapter.phi].start == "random":
        return False
    plain = (config.reading, config.optimizer, config.accumulation, config.mixed_precision)
    off = (config.penalty, config.max_grad_norm, config.probe_every, config.stop_below)
    return plain == ("weighted", "adamw", 1, "no") and not any(off)


def next_rate(lr: float, up: bool) -> float:
    """The neighbour on the axis 1, 3, 10, 30, ...; half a decade away where lr is not on it."""
    power = math.floor(math.log10(lr) + 1e-9)
    mantissa = round(lr / 10**power, 6)
    steps = {1.0: (0.3, 3.0), 3.0: (1.0, 10.0)}
    if mantissa in steps:
        return float(f"{steps[mantissa][up] * 10**power:.3g}")
    return float(f"{lr * math.sqrt(10) ** (1 if up else -1):.3g}")


class MapPlanner:
    """Builds the stages of one map."""

    def __init__(self, resolved: ResolvedMap, store: StageStore):
        self.map, self.store = resolved, store
        self.lineage = Lineage(resolved.suite, store)

    def plan(self) -> MapPlan:
        """References, the grid, and as many extensions as the cells so far ask for."""
        references = plan_rows(self.lineage)
        probes = [entry for entry in references.probes if entry.result.label == self.original]
        plan = MapPlan(self.map.suite, results=references.results, probes=probes)
        for row in self.map.rows:
            for seed in self.map.spec.seeds:
                points = list(itertools.product(row.lrs, row.lambdas))
                self._add(plan, row, seed, points, extension=False)
        for row in self.map.rows:
            plan.edges[row.label] = {side: self._edge(plan, row, side) for side in SIDES}
            if any(edge.lr is None for edge in plan.edges[row.label].values()):
                plan.waiting.append(row.label)
        return plan

    @property
    def original(self) -> str:
        """Label of Original, whose probes every cell is read beside."""
        return next(row.label for row in self.map.suite.rows if row.method == "original")

    def probed(self, plan: Plan) -> dict[int, dict[str, float | None]]:
        """Seed -> what the suite's probes say of Original, as far as it is there."""
        values: dict[int, dict[str, float | None]] = {}
        for entry in plan.probes:
            table = read_table(self.store, entry.stage)
            if table is not None and table.rows:
                summary = self.map.suite.probes[entry.name].probe.summary(table)
                values.setdefault(entry.result.seed, {}).update(summary)
        return values

    def target(self, seed: int, replicate: int = 0) -> Target | None:
        """What a Retrain scores; None while it is not there.

        Raises:
            DataError: It diverged.
        """
        retrain = self.lineage.retrain(seed, replicate)
        record = read_record(self.store, self.lineage.evaluated(retrain, seed, replicate))
        return None if record is None else _target(record, self.map.rule.axes.metrics)

    def cells(self, block: Block) -> list[Cell] | None:
        """The cells of a block; None while it is not done."""
        about = block.row.label, block.seed, block.extension

        def parse(text: str) -> list[Cell]:
            return [Cell.of(json.loads(line), *about) for line in text.splitlines()]

        return read_stored(self.store, block.stage, CELLS, parse)

    def _add(
        self, plan: MapPlan, row: GridRow, seed: int, points: Sequence[Point], *, extension: bool
    ) -> None:
        for chosen in _chunks(points, self.map.spec.map.block):
            stage = self._block(row, seed, chosen)
            plan.blocks.append(Block(row, seed, chosen, extension, stage))
            plan.results.append(Result(row.label, seed, 0, len(plan.blocks), stage))

    def _block(self, row: GridRow, seed: int, points: tuple[Point, ...]) -> Stage:
        configs = [row.config(lr, lam) for lr, lam in points]
        together = runs_together(row.cls, configs[0]) and _differ_in_rate_and_weight_only(configs)
        params = [canonical(config) for config in configs]
        identity = {
            **self.lineage.identity("score"),
            "map_version": MapBlock.version,
            "method": row.method,
            "method_version": row.cls.info.version,
            "points": params,
            "steps": row.steps,
            "seed": seed,
        }
        first, last = points[0][0], points[-1][0]
        name = f"{row.label}/seed-{seed}/lr-{first:g}" + (f"..{last:g}" if last != first else "")
        return self.lineage.stage(
            "map",
            name,
            identity,
            {"split": self.lineage.split(seed), "start": self.lineage.original(seed)},
            seed=seed,
            method=row.method,
            points=points,
            params=params,
            steps=row.steps,
            together=together,
        )

    def _edge(self, plan: MapPlan, row: GridRow, side: str) -> Edge:
        """Adds columns until one has no accepted cell, or as many as are allowed."""
        up = side == "high"
        lr = max(row.lrs) if up else min(row.lrs)
        limit = getattr(self.map.spec.map.extend, side)
        for added in range(limit + 1):
            accepted = self._accepted_at(plan, row, lr)
            if accepted is None:
                return Edge(None, False)
            if accepted == 0 or added == limit:
                return Edge(lr, accepted == 0)
            lr = next_rate(lr, up)
            for seed in self.map.spec.seeds:
                points = [(lr, lam) for lam in row.lambdas]
                self._add(plan, row, seed, points, extension=True)
        raise AssertionError("unreachable")

    def _accepted_at(self, plan: MapPlan, row: GridRow, lr: float) -> int | None:
        """Accepted cells of a column over all seeds; None while something is missing."""
        count = 0
        for block in plan.blocks:
            if block.row.label != row.label or all(point[0] != lr for point in block.points):
                continue
            cells, target = self.cells(block), self.target(block.seed)
            if cells is None or target is None:
                return None
            count += sum(cell.lr == lr and not judge(cell, target, self.map.rule) for cell in cells)
        return count


def _differ_in_rate_and_weight_only(configs: Sequence[Any]) -> bool:
    shared = [config.model_copy(update={"lr": 1.0, "lam": 1.0}) for config in configs]
    return all(config == shared[0] for config in shared)


def _chunks(points: Sequence[Point], size: int) -> Iterator[tuple[Point, ...]]:
    for start in range(0, len(points), size):
        yield tuple(points[start : start + size])


def _target(record: RunRecord, metrics: Sequence[str]) -> Target:
    values = {name: record.metrics.get(name) for name in metrics}
    target = {name: value for name, value in values.items() if value is not None}
    if record.status != "ok" or len(target) != len(values):
        raise DataError(
            f"Retrain of seed {record.seed} diverged, so nothing can be judged; leave that seed out"
        )
    return target


def planner_of(resolved: ResolvedMap) -> Callable[[ResolvedSuite, StageStore], Plan]:
    """What :func:`benchmarks.pipeline.schedule.run_suite` plans with."""
    return lambda suite, store: MapPlanner(resolved, store).plan()
