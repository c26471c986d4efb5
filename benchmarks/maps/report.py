"""A map's table, JSON, Markdown and files, from the blocks that are in the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.audits import report as audit_table
from benchmarks.audits.report import audit_tables
from benchmarks.maps.cells import Cell, Edge, Target
from benchmarks.maps.derive import (
    Ceiling,
    MapComparison,
    MapLine,
    compare_lines,
    derive_ceiling,
    derive_line,
)
from benchmarks.maps.plan import SIDES, MapPlanner
from benchmarks.maps.resolve import ResolvedMap
from benchmarks.report.cells import plain
from benchmarks.report.table import markdown_table
from benchmarks.spec.resolve import ResolvedRow, ResolvedSuite
from benchmarks.spec.suite import Row
from common.measure.gaps import summarise
from common.measure.metric import MapAxes
from common.store.stages import StageStore

if TYPE_CHECKING:
    from benchmarks.audits.derive import AuditTable


CEILING = "retrain*"


@dataclass
class MapBoard:
    """Everything that a map shows.

    Attributes:
        resolved: The map.
        lines: One per row, as far as there are cells.
        ceiling: A second Retrain under the rule.
        comparisons: As listed in the map.
        cells: Every cell, for the JSON lines.
        targets: Seed -> Retrain.
        missing: Blocks that are not in the store.
        probes: Audits of the best cells.
    """

    resolved: ResolvedMap
    lines: list[MapLine]
    ceiling: Ceiling
    comparisons: list[MapComparison]
    cells: list[Cell]
    targets: dict[int, Target]
    missing: int
    probes: list[AuditTable] = field(default_factory=list)


def make_board(resolved: ResolvedMap, store: StageStore) -> MapBoard:
    """Reads what is there and derives the table; a row counts the seeds that are complete."""
    planner = MapPlanner(resolved, store)
    plan = planner.plan()
    seeds = resolved.spec.seeds
    targets = {s: t for s in seeds if (t := planner.target(s)) is not None}
    second = {s: t for s in seeds if (t := planner.target(s, 1)) is not None}
    lines, cells, missing = [], [], 0
    for row in resolved.rows:
        blocks = [block for block in plan.blocks if block.row.label == row.label]
        found = [(block, planner.cells(block)) for block in blocks]
        open_seeds = {b.seed for b, c in found if c is None} | (set(seeds) - set(targets))
        missing += sum(c is None for _, c in found)
        own = [cell for b, c in found if c and b.seed not in open_seeds for cell in c]
        cells += [cell for _, c in found if c for cell in c]
        if own:
            edges = plan.edges[row.label]
            lines.append(derive_line(row.label, own, targets, resolved.rule, edges))
    ceiling = derive_ceiling(targets, second, resolved.rule)
    by_label = {line.label: line for line in lines}
    comparisons = [
        found_one
        for a, b in resolved.spec.map.compare
        if a in by_label
        and b in by_label
        and (found_one := compare_lines(by_label[a], by_label[b])) is not None
    ]
    board = MapBoard(resolved, lines, ceiling, comparisons, cells, targets, missing)
    board.probes = audit_tables(probe_suite(board), store)
    return board


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


class Titles(NamedTuple):
    """Column heads of the three metrics that a map judges."""

    forgotten: str
    retained: str
    utility: str


def titles(board: MapBoard) -> Titles:
    """As the benchmark names them."""
    axes = board.resolved.rule.axes
    names = (axes.forgotten, axes.retained, axes.utility)
    return Titles(*(board.resolved.metric(name).title for name in names))


def table_heads(board: MapBoard) -> list[str]:
    """Heads of :func:`table_rows`."""
    retained = titles(board).retained
    shares = ["method", "accepted %", "strict %", "loose %", "band", "of"]
    return [*shares, f"worst {retained}", f"median {retained}", "✗"]


def where_heads(board: MapBoard) -> list[str]:
    """Heads of :func:`where_rows`."""
    return [
        *("method", "lower edge", "upper edge", "best cell", "seeds"),
        f"its {titles(board).utility}",
    ]


def table_rows(board: MapBoard) -> list[list[str]]:
    """How much is accepted: one row per method, after the ceiling."""
    rows = [_ceiling_row(board.ceiling)] if board.ceiling.seeds else []
    return rows + [_line_row(line) for line in board.lines]


def _ceiling_row(ceiling: Ceiling) -> list[str]:
    rules = (ceiling.accepted, ceiling.strict, ceiling.loose)
    passed = [f"{sum(flags)} of {len(flags)}" for flags in rules]
    return [CEILING, *passed, *["–"] * 5]


def _line_row(line: MapLine) -> list[str]:
    worst = [value for value in line.worst_retained if value is not None]
    middle = [value for value in line.median_retained if value is not None]
    return [
        line.label,
        *(plain(summarise(v), 1) for v in (line.accepted, line.strict, line.loose)),
        plain(summarise(line.band), 2),
        f"{line.widest:.1f}",
        f"{min(worst):.1f}" if worst else "–",
        plain(summarise(middle), 1) if middle else "–",
        str(line.diverged),
    ]


def where_rows(board: MapBoard) -> list[list[str]]:
    """Where it is accepted: edges and the best cell of every method."""
    digits = board.resolved.metric(board.resolved.rule.axes.utility).digits
    rows = []
    for line in board.lines:
        best = line.best
        cell = ["none", "–", "–"]
        if best is not None:
            place = f"lr {best.lr:g}, λ {best.lam:g}, step {best.step}"
            cell = [place, f"{best.seeds}/{len(line.seeds)}", plain(best.utility, digits)]
        rows.append([line.label, *(edge_text(line.edges[side]) for side in SIDES), *cell])
    return rows


def edge_text(edge: Edge) -> str:
    """``fails at 0.1``, ``not found by 1``, or ``open`` while cells are missing."""
    if edge.lr is None:
        return "open"
    return f"fails at {edge.lr:g}" if edge.found else f"not found by {edge.lr:g}"


def rate_table(board: MapBoard) -> tuple[list[str], list[list[str]]]:
    """Accepted share per effective rate over seeds, lambdas and steps; extensions included."""
    rates = sorted({lr for line in board.lines for lr in line.by_lr})
    rows = [
        [line.label, *(f"{line.by_lr[r]:.0f}" if r in line.by_lr else "" for r in rates)]
        for line in board.lines
    ]
    return ["method", *(f"{rate:g}" for rate in rates)], rows


def legend(board: MapBoard) -> list[str]:
    """How to read the table."""
    grid = board.resolved.spec.map
    rule, names = board.resolved.rule, titles(board)
    most, ra, ta = (f"{value:g}" for value in rule.tolerances.values())
    fa = f"|{names.forgotten} - Retrain|" if rule.two_sided else names.forgotten
    return [
        f"Accepted: {names.retained} >= Retrain - {ra}, {names.utility} >= Retrain - {ta}, {fa} <= "
        f"{most}; strict at half and loose at double these tolerances.",
        f"Grid: effective lr {_list(grid.lrs)} x lambda {_list(grid.lambdas)} x step "
        f"{_list(grid.steps)}, the same start and batches for all methods; mean ± std over "
        f"{len(board.targets)} seeds, which are the unit. Columns added to find an edge count for "
        "band and edges only.",
        "Band: longest accepted run on the lr axis in decades, averaged over lambda and step; next "
        f"to it the widest possible. Worst and median {names.retained}: over the cells that did "
        f"not diverge (✗: those that did). {CEILING}: seeds on which a second Retrain passes the "
        "rule.",
        "An edge is the outermost column, if it has no accepted cell. Best cell: accepted on most "
        f"seeds, then highest {names.utility}; picked on these very numbers, so optimistic.",
    ]


def probe_text(board: MapBoard) -> str:
    """What the probe's tables are about; empty without one."""
    if not board.resolved.probe:
        return ""
    if board.missing:
        return "The probe of the best cells waits for the missing blocks."
    none = [line.label for line in board.lines if line.best is None]
    text = "The best cell of each row, trained again and audited beside two Retrains."
    return text + (f" No accepted cell: {', '.join(none)}." if none else "")


def _list(values: Sequence[float]) -> str:
    return "{" + ", ".join(f"{value:g}" for value in values) + "}"


def comparison_lines(board: MapBoard) -> list[str]:
    """``gd_ball - gd_lora: +72.0 points (...)``."""
    lines = [
        f"{c.first} - {c.second}: {plain(c.summary, 1)} points of accepted cells "
        f"({', '.join(f'{d:+.0f}' for d in c.differences)}; sign test p = {c.p_value:.3g})"
        for c in board.comparisons
    ]
    most = max((len(c.differences) for c in board.comparisons), default=0)
    if most:
        lines.append(
            "Two-sided sign test over seeds; "
            f"{most} of them cannot give a p below {2 / 2**most:.3g}."
        )
    return lines


def to_json(board: MapBoard) -> dict[str, Any]:
    """Everything that was derived, as plain numbers."""
    spec, rule = board.resolved.spec, board.resolved.rule
    lines = []
    for line in board.lines:
        packed = _named(dataclasses.asdict(line), rule.axes)
        for name in ("by_lr", "by_lam", "by_step"):
            packed[name] = {f"{k:g}": v for k, v in packed[name].items()}
        for name in ("accepted", "strict", "loose", "band"):
            packed[f"{name}_summary"] = dataclasses.asdict(summarise(packed[name]))
        lines.append(packed)
    return {
        "map": board.resolved.name,
        "version": spec.version,
        "suite": spec.suite,
        "kind": "measured",
        "complete": board.missing == 0,
        "seeds": list(spec.seeds),
        "grid": {
            **spec.map.model_dump(mode="json"),
            "rule": {**rule.tolerances, "two_sided": rule.two_sided},
        },
        "targets": {str(s): dict(t) for s, t in board.targets.items()},
        "ceiling": dataclasses.asdict(board.ceiling),
        "lines": lines,
        "comparisons": [dataclasses.asdict(c) for c in board.comparisons],
        "probe": audit_table.to_json(board.probes),
    }


def _named(line: dict[str, Any], axes: MapAxes) -> dict[str, Any]:
    """A line's JSON under the names of the metrics: ``worst_ra``, ``best.ta``, ``ra_drop``."""
    for name in ("worst", "median"):
        line[f"{name}_{axes.retained}"] = line.pop(f"{name}_retained")
    if line["best"] is not None:
        line["best"][axes.utility] = line["best"].pop("utility")
    for square in line["squares"]:
        square[f"{axes.retained}_drop"] = square.pop("retained_drop")
    return line


def to_markdown(board: MapBoard) -> str:
    """The whole map as a page; the picture lies beside it."""
    spec = board.resolved.spec
    blocks = [f"# {board.resolved.name}: stability map (measured)"]
    blocks += [text for text in (spec.title, spec.notes) if text]
    if board.missing:
        blocks.append(f"**Incomplete: {board.missing} blocks are missing.**")
    blocks += [
        markdown_table(table_heads(board), table_rows(board)),
        markdown_table(where_heads(board), where_rows(board)),
        *legend(board),
    ]
    if board.comparisons:
        blocks += ["## Paired differences", "\n".join(f"- {x}" for x in comparison_lines(board))]
    blocks += ["## Accepted % per effective learning rate"]
    blocks += [markdown_table(*rate_table(board)), "![map](map.svg)"]
    if board.resolved.probe:
        blocks += ["## Probe", probe_text(board), audit_table.to_markdown(board.probes)]
    return "\n\n".join(blocks) + "\n"
