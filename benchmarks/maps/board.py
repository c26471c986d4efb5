"""What a map shows, from the blocks that are in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from stable_forgetting.benchmarks.audits.report import audit_tables
from stable_forgetting.benchmarks.audits.stored import stored_plan
from stable_forgetting.benchmarks.maps.cells import Cell, Target
from stable_forgetting.benchmarks.maps.derive import (
    Ceiling,
    MapComparison,
    MapLine,
    compare_lines,
    derive_ceiling,
    derive_line,
)
from stable_forgetting.benchmarks.maps.plan import MapPlanner
from stable_forgetting.benchmarks.maps.resolve import ResolvedMap
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import Row
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.audits.derive import AuditTable


class Titles(NamedTuple):
    """Column heads of the three metrics that a map judges."""

    forgotten: str
    retained: str
    utility: str


@dataclass
class MapBoard:
    """Everything that a map shows.

    Attributes:
        lines: One per row, as far as there are cells.
        ceiling: A second Retrain under the rule.
        targets: Seed -> Retrain.
        missing: Blocks that are not in the store.
    """

    resolved: ResolvedMap
    lines: list[MapLine]
    ceiling: Ceiling
    comparisons: list[MapComparison]
    cells: list[Cell]
    targets: dict[int, Target]
    missing: int
    probes: list[AuditTable] = field(default_factory=list)

    @property
    def titles(self) -> Titles:
        """Heads of the judged metrics, as the benchmark names them."""
        axes = self.resolved.rule.axes
        names = (axes.forgotten, axes.retained, axes.utility)
        return Titles(*(self.resolved.metric(name).title for name in names))


def make_board(resolved: ResolvedMap, store: StageStore) -> MapBoard:
    """Reads what is there and derives the table; a row counts the seeds that are complete."""
    planner = MapPlanner(resolved, store)
    plan = planner.plan()
    original = planner.probed(plan)
    seeds = resolved.spec.seeds
    targets = {s: t for s in seeds if (t := planner.target(s)) is not None}
    second = {s: t for s in seeds if (t := planner.target(s, 1)) is not None}
    lines, cells, missing = [], [], 0
    for row in resolved.rows:
        blocks = [block for block in plan.blocks if block.row.label == row.label]
        stored = [
            (block, related(resolved, planner.cells(block), original.get(block.seed)))
            for block in blocks
        ]
        open_seeds = {b.seed for b, c in stored if c is None} | (set(seeds) - set(targets))
        missing += sum(c is None for _, c in stored)
        own = [cell for b, c in stored if c and b.seed not in open_seeds for cell in c]
        cells += [cell for _, c in stored if c for cell in c]
        if own:
            edges = plan.edges[row.label]
            names = [metric.name for metric in resolved.further]
            lines.append(derive_line(row.label, own, targets, resolved.rule, edges, names))
    ceiling = derive_ceiling(targets, second, resolved.rule)
    by_label = {line.label: line for line in lines}
    pairs = [pair for pair in resolved.spec.map.compare if set(pair) <= set(by_label)]
    compared = [compare_lines(by_label[first], by_label[second]) for first, second in pairs]
    comparisons = [comparison for comparison in compared if comparison is not None]
    board = MapBoard(resolved, lines, ceiling, comparisons, cells, targets, missing)
    suite = probe_suite(board)
    board.probes = audit_tables(suite, store, stored_plan(suite, store))
    return board


def related(
    resolved: ResolvedMap, cells: list[Cell] | None, original: Mapping[str, float | None] | None
) -> list[Cell] | None:
    """The cells with what probes of the suite make of them beside Original.

    Args:
        resolved: Whose suite has the probes.
        cells: Of a block; None where it is not there.
        original: What the probes say of Original; None where that is not there.
    """
    if not cells or not original:
        return cells
    entries = resolved.suite.probes.values()

    def beside(cell: Cell) -> Cell:
        metrics = {**original, **cell.metrics}
        further = {k: v for entry in entries for k, v in entry.probe.related(metrics).items()}
        return replace(cell, metrics={**cell.metrics, **further})

    return [beside(cell) for cell in cells]


def probe_suite(board: MapBoard) -> ResolvedSuite:
    """The best cell of every row as a suite with the map's probe as its audits.

    A cell is trained again by its method itself, alone and for just as many steps.  Rows without
    an accepted cell are left out; all are, and the audits too, while the map is incomplete.
    """
    resolved = board.resolved
    suite, best = resolved.suite, {line.label: line.best for line in board.lines}
    rows = list(suite.rows)
    for row in resolved.rows:
        cell = best.get(row.label)
        if cell is not None:
            config = row.config(cell.lr, cell.lam).model_copy(update={"steps": cell.step})
            rows.append(ResolvedRow(row.label, row.method, config))
    spec = suite.spec.model_copy(
        update={
            "suite": f"{resolved.name}-probe",
            "methods": {row.label: Row(method=row.method) for row in rows},
            "compare": (),
            "published": (),
        }
    )
    audits = {} if board.missing else resolved.probe
    return replace(suite, spec=spec, rows=tuple(rows), audits=audits)
