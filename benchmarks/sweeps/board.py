"""What a sweep shows, from the blocks that are in the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.benchmarks.audits.stored import StoredPlan
from stable_forgetting.benchmarks.pipeline.cells import Cell, Target
from stable_forgetting.benchmarks.pipeline.grid import SIDES
from stable_forgetting.benchmarks.pipeline.measuring import read_table
from stable_forgetting.benchmarks.pipeline.sweeping import GridReader
from stable_forgetting.benchmarks.suite.goals import metric_specs
from stable_forgetting.benchmarks.suite.grid import Acceptance, Grid
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.sweeps.derive import (
    Ceiling,
    SweepComparison,
    SweepLine,
    compare_lines,
    derive_ceiling,
    derive_line,
)
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.gaps import summarise
from stable_forgetting.common.measure.metric import MetricSpec, SweepAxes
from stable_forgetting.common.store.stages import StageStore


@dataclass
class Sweep:
    """Everything that a sweep shows.

    Attributes:
        lines: One per row, as far as there are cells.
        ceiling: A second Retrain under the rule.
        targets: Seed -> Retrain.
        missing: Blocks that are not in the store.
        audits: Of the best cell of every row.
    """

    suite: ResolvedSuite
    lines: list[SweepLine]
    ceiling: Ceiling
    comparisons: list[SweepComparison]
    cells: list[Cell]
    targets: dict[int, Target]
    missing: int
    audits: Sequence[AuditTable] = field(default=())

    @property
    def grid(self) -> Grid:
        """As it was written."""
        assert self.suite.spec.grid is not None
        return self.suite.spec.grid

    @property
    def rule(self) -> Acceptance:
        """When a cell is acceptable."""
        assert self.suite.accepts is not None
        return self.suite.accepts

    @property
    def titles(self) -> SweepAxes:
        """Heads of the judged metrics, as the benchmark names them, in the place of their names."""
        axes = self.rule.axes
        names = (axes.forgotten, axes.retained, axes.utility)
        forgotten, retained, utility = (self.metric(name).title for name in names)
        return SweepAxes(forgotten, retained, utility, axes.tolerances)

    def metric(self, name: str) -> MetricSpec:
        """What the benchmark declares of one of its metrics."""
        metrics = BENCHMARKS[self.suite.spec.benchmark].metrics
        return next(metric for metric in metrics if metric.name == name)

    def axis(self, label: str) -> str | None:
        """The parameter on a row's second axis."""
        return next((r.grid.axis for r in self.suite.rows if r.grid and r.label == label), None)


def make_sweep(
    suite: ResolvedSuite, store: StageStore, plan: StoredPlan, audits: Sequence[AuditTable]
) -> Sweep:
    """Reads what is there and derives the tables; a row counts the seeds that are complete."""
    reader, original = GridReader(suite, store, plan.results), _original(suite, store, plan)
    seeds = suite.spec.seeds
    targets = {s: t for s in seeds if (t := reader.target(s)) is not None}
    second = {s: t for s in seeds if (t := reader.target(s, 1)) is not None}
    further = [metric.name for metric in further_metrics(suite)]
    lines, cells, missing = [], [], 0
    for row in (row for row in suite.rows if row.grid):
        blocks = [block for block in plan.blocks if block.label == row.label]
        stored = [
            (block, related(suite, reader.cells(block), original.get(block.seed)))
            for block in blocks
        ]
        open_seeds = {b.seed for b, c in stored if c is None} | (set(seeds) - set(targets))
        missing += sum(c is None for _, c in stored)
        own = [cell for b, c in stored if c and b.seed not in open_seeds for cell in c]
        cells += [cell for _, c in stored if c for cell in c]
        if own:
            edges = {side: reader.edge(blocks, side) for side in SIDES}
            lines.append(derive_line(row.label, own, targets, reader.rule, edges, further))
    by_label = {line.label: line for line in lines}
    pairs = [pair for pair in suite.spec.compare if set(pair) <= set(by_label)]
    compared = [compare_lines(by_label[first], by_label[second]) for first, second in pairs]
    comparisons = [comparison for comparison in compared if comparison is not None]
    ceiling = derive_ceiling(targets, second, reader.rule)
    audits = () if missing else audits
    return Sweep(suite, lines, ceiling, comparisons, cells, targets, missing, audits)


def further_metrics(suite: ResolvedSuite) -> tuple[MetricSpec, ...]:
    """What probes of a suite make of a cell's metrics beside those of Original."""
    specs = metric_specs(suite.spec, suite.probes)
    given = dict.fromkeys(specs, 1.0)
    entries = suite.probes.values()
    return tuple(specs[name] for entry in entries for name in entry.probe.related(given))


def _original(
    suite: ResolvedSuite, store: StageStore, plan: StoredPlan
) -> dict[int, dict[str, float | None]]:
    """Seed -> what the suite's probes say of Original, as far as it is there."""
    labels = {row.label for row in suite.rows if row.method == "original"}
    values: dict[int, dict[str, float | None]] = {}
    for entry in (entry for entry in plan.probes if entry.result.label in labels):
        table = read_table(store, entry.stage)
        if table is not None and table.rows:
            summary = suite.probes[entry.name].probe.summary(table)
            values.setdefault(entry.result.seed, {}).update(summary)
    return values


def related(
    suite: ResolvedSuite, cells: list[Cell] | None, original: Mapping[str, float | None] | None
) -> list[Cell] | None:
    """The cells of a block with what probes of the suite make of them beside Original."""
    if not cells or not original:
        return cells
    entries = suite.probes.values()

    def beside(cell: Cell) -> Cell:
        metrics = {**original, **cell.metrics}
        further = {k: v for entry in entries for k, v in entry.probe.related(metrics).items()}
        return replace(cell, metrics={**cell.metrics, **further})

    return [beside(cell) for cell in cells]


def to_json(board: Sweep) -> dict[str, Any]:
    """Everything that was derived, as plain numbers."""
    rule = board.rule
    lines = []
    for line in board.lines:
        packed = _named(dataclasses.asdict(line), rule.axes)
        for name in ("by_lr", "by_lam", "by_step"):
            packed[name] = {f"{k:g}": v for k, v in packed[name].items()}
        for name in ("accepted", "strict", "loose", "band"):
            packed[f"{name}_summary"] = dataclasses.asdict(summarise(packed[name]))
        lines.append(packed)
    return {
        "complete": board.missing == 0,
        "grid": {
            **board.grid.model_dump(mode="json"),
            "rule": {**rule.tolerances, "two_sided": rule.two_sided},
        },
        "targets": {str(s): dict(t) for s, t in board.targets.items()},
        "ceiling": dataclasses.asdict(board.ceiling),
        "lines": lines,
        "comparisons": [dataclasses.asdict(c) for c in board.comparisons],
    }


def _named(line: dict[str, Any], axes: SweepAxes) -> dict[str, Any]:
    """A line's JSON under the names of the metrics: ``worst_ra``, ``best.ta``, ``ra_drop``."""
    for name in ("worst", "median"):
        line[f"{name}_{axes.retained}"] = line.pop(f"{name}_retained")
    if line["best"] is not None:
        line["best"][axes.utility] = line["best"].pop("utility")
    for square in line["squares"]:
        square[f"{axes.retained}_drop"] = square.pop("retained_drop")
    return line
