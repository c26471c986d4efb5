"""Sweep -> sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from stable_forgetting.benchmarks.audits.report import sections as audit_sections
from stable_forgetting.benchmarks.pipeline.cells import UNDER, Cell, Edge, judge
from stable_forgetting.benchmarks.pipeline.grid import SIDES, runs_together
from stable_forgetting.benchmarks.report.cells import MISSING, number, significant, spread
from stable_forgetting.benchmarks.report.section import Column, Section, Table, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.sweeps.board import Sweep, further_metrics
from stable_forgetting.benchmarks.sweeps.depth import depth_picture, depth_table
from stable_forgetting.benchmarks.sweeps.derive import SweepComparison, SweepLine
from stable_forgetting.benchmarks.sweeps.draw import picture
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.measure.gaps import summarise
from stable_forgetting.common.measure.metric import MetricSpec

CEILING = "retrain*"


def sections(board: Sweep) -> list[Section]:
    """Everything that a sweep says beside what every suite does, in order."""
    compared = comparison_lines(board.comparisons)
    audited, depth = audits_text(board), depth_picture(board)
    shown = [Section("Best cells", (audited,))] if audited else []
    shown += audit_sections(board.audits)
    sizes = depth_table(board)
    found = [*([depth] if depth else ()), *([sizes] if sizes.rows else ())]
    titles = ["Accepted settings and steps to relearn", ""]
    shown += [Section(t, content=c, level="full") for t, c in zip(titles, found, strict=False)]
    return [
        Section(content=share_table(board)),
        Section(content=place_table(board)),
        Section(text=legend(board), tone="muted"),
        *([Section("Paired differences", lines=compared)] if compared else ()),
        Section("Accepted % per effective learning rate", content=rate_table(board)),
        *regime_sections(board),
        Section(content=picture(board), level="full"),
        *shown,
    ]


def share_table(board: Sweep) -> Table:
    """How much is accepted: one row per method, after the ceiling."""
    retained = board.titles.retained
    heads: list[str | Column] = ["method", "accepted %", "strict %", "loose %", "band", "of"]
    of = f"{retained} over the grid's cells"
    heads.append(Column(f"worst {retained}", doc=f"is the lowest {of}"))
    heads += [Column(f"median {retained}", doc=f"is the median {of}, mean over seeds"), "✗"]
    further = further_metrics(board.suite)
    heads += [Column(m.title, doc=f"is the highest {m.doc}, over the cells") for m in further]
    rows, ceiling = [_share_row(line, further) for line in board.lines], board.ceiling
    if ceiling.seeds:
        rules = (ceiling.accepted, ceiling.strict, ceiling.loose)
        passed = [f"{sum(flags)} of {len(flags)}" for flags in rules]
        rows.insert(0, [CEILING, *passed, *[MISSING] * (5 + len(further))])
    return table(heads, rows, marks={CEILING: "goal"})


def _share_row(line: SweepLine, further: Sequence[MetricSpec]) -> list[str]:
    worst = [value for value in line.worst_retained if value is not None]
    middle = [value for value in line.median_retained if value is not None]
    return [
        line.label,
        *(spread(summarise(v), 1) for v in (line.accepted, line.strict, line.loose)),
        spread(summarise(line.band)),
        number(line.widest, 1),
        number(min(worst, default=None), 1),
        spread(summarise(middle) if middle else None, 1),
        str(line.diverged),
        *(number(line.highest.get(metric.name), metric.digits) for metric in further),
    ]


def place_table(board: Sweep) -> Table:
    """Where it is accepted: edges and the best cell of every method."""
    digits = board.metric(board.rule.axes.utility).digits
    rows = []
    for line in board.lines:
        best = line.best
        cell = ["none", MISSING, MISSING]
        if best is not None:
            place = f"lr {best.lr:g}, λ {best.lam:g}, step {best.step}"
            cell = [place, f"{best.seeds}/{len(line.seeds)}", spread(best.utility, digits)]
        rows.append([line.label, *(edge_text(line.edges[side]) for side in SIDES), *cell])
    utility = Column(f"its {board.titles.utility}", doc="is the best cell's")
    heads: list[str | Column] = [
        "method",
        "lower edge",
        "upper edge",
        "best cell",
        "seeds",
        utility,
    ]
    return table(heads, rows)


def edge_text(edge: Edge) -> str:
    """``fails at 0.1``, ``not found by 1``, or ``open`` while cells are missing."""
    if edge.lr is None:
        return "open"
    return f"fails at {edge.lr:g}" if edge.fails else f"not found by {edge.lr:g}"


def rate_table(board: Sweep) -> Table:
    """Accepted share per effective rate over seeds, lambdas and steps; extensions included."""
    rates = sorted({lr for line in board.lines for lr in line.by_lr})
    rows = [
        [line.label, *(f"{line.by_lr[r]:.0f}" if r in line.by_lr else "" for r in rates)]
        for line in board.lines
    ]
    return table(["method", *(f"{rate:g}" for rate in rates)], rows)


def legend(board: Sweep) -> tuple[str, ...]:
    """How to read the table."""
    grid = board.grid
    rule, names = board.rule, board.titles
    most, ra, ta = (f"{value:g}" for value in rule.tolerances.values())
    fa = f"|{names.forgotten} - Retrain|" if rule.two_sided else names.forgotten
    return (
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
    )


def audits_text(board: Sweep) -> str:
    """What the audits' tables are about; empty without audits."""
    if not board.suite.audits:
        return ""
    if board.missing:
        return "The audits of the best cells wait for the missing blocks."
    none = [line.label for line in board.lines if line.best is None]
    text = "The best cell of each row, trained again and audited beside two Retrains."
    return text + (f" No accepted cell: {', '.join(none)}." if none else "")


def _list(values: Sequence[float]) -> str:
    return "{" + ", ".join(f"{value:g}" for value in values) + "}"


def comparison_lines(comparisons: Sequence[SweepComparison]) -> tuple[str, ...]:
    """``gd_ball - gd_lora: +72.0 points (...)``, and what the test cannot give."""
    lines = [
        f"{c.first} - {c.second}: {spread(c.summary, 1)} points of accepted cells "
        f"({', '.join(f'{d:+.0f}' for d in c.differences)}; sign test p = {c.p_value:.3g})"
        for c in comparisons
    ]
    most = max((len(c.differences) for c in comparisons), default=0)
    if most:
        lines.append(
            "Two-sided sign test over seeds; "
            f"{most} of them cannot give a p below {2 / 2**most:.3g}."
        )
    return tuple(lines)


def grid_section(suite: ResolvedSuite) -> Section:
    """Runs, optimizer steps and samples per method, from counts."""
    grid, seeds, rows = suite.spec.grid, len(suite.spec.seeds), []
    assert grid is not None
    for row in suite.rows:
        if row.grid is None:
            continue
        config: Any = row.config
        runs = len(row.grid.points)
        steps = runs * max(row.grid.steps)
        together = runs_together(METHODS[row.method], config)
        block = min(grid.block, runs) if together else 1
        counts = [runs, runs * len(row.grid.steps), steps, config.batch_size, block, steps * seeds]
        rows.append([row.label, *[str(count) for count in counts]])
    heads = ["method", "runs/seed", "cells/seed", "steps/seed", "batch", "at once", "steps in all"]
    text = "Columns that are added to find an edge come on top."
    return Section(f"Grid: {seeds} seeds", (text,), table(heads, rows))


Tell = Callable[[Sequence[Cell]], str]
"""Cells of one method at one rate -> what the table says of them."""


def regime_sections(board: Sweep) -> list[Section]:
    """The tables that have something to say; one that would be empty is left out."""
    retained = board.titles.retained

    def kept(cells: Sequence[Cell]) -> str:
        """The retained metric of the cells that forgot, and how many these are."""
        rule, axes = board.rule, board.rule.axes
        cells = [cell for cell in cells if cell.seed in board.targets]
        forgot = [
            value
            for cell in _finite(cells)
            if UNDER not in judge(cell, board.targets[cell.seed], rule)
            and (value := cell.metrics[axes.retained]) is not None
        ]
        if not forgot:
            return MISSING
        return f"{number(median(forgot), 1)} ({len(forgot)} of {len(cells)})"

    told: tuple[tuple[str, str, Tell], ...] = (
        (
            "Distance from Original",
            "Median ||dW|| / ||W0|| over the changed matrices.",
            _moved,
        ),
        (
            "Where the bound acts",
            "Mean share in percent: of entries whose argument of phi is above 0.5 (of a clip: "
            "above its threshold), in brackets above pi / 2 where that was noted; of a norm ball, "
            "of layers at it.",
            _acting,
        ),
        (
            f"{retained} where forgotten",
            f"Median {retained} of the cells that forget, and how many of all they are.",
            kept,
        ),
        (
            "Diverged",
            "Cells in which a number was not finite or a loss passed the cap (10,000), and the "
            "earliest step at which one had.",
            _diverged,
        ),
    )
    made = [(title, text, _by_rate(board, tell)) for title, text, tell in told]
    return [
        Section(title, (text,), content=content, level="full")
        for title, text, content in made
        if any(cell not in ("", MISSING) for row in content.rows for cell in row[1:])
    ]


def _by_rate(board: Sweep, tell: Tell) -> Table:
    rates = sorted({cell.lr for cell in board.cells})
    rows = []
    for line in board.lines:
        own = [cell for cell in board.cells if cell.label == line.label]
        groups = [[cell for cell in own if cell.lr == rate] for rate in rates]
        rows.append([line.label, *(tell(group) if group else "" for group in groups)])
    return table(["method", *(f"{rate:g}" for rate in rates)], rows)


def _finite(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if not cell.nonfinite]


def _moved(cells: Sequence[Cell]) -> str:
    known = [ratio for cell in _finite(cells) if (ratio := cell.delta_ratio) is not None]
    return significant(median(known) if known else None)


def _acting(cells: Sequence[Cell]) -> str:
    finite = _finite(cells)
    acting = [c.bound_share for c in finite if c.bound_share is not None]
    turned = [c.turned_share for c in finite if c.turned_share is not None]
    if not acting:
        return MISSING
    text = f"{100 * fmean(acting):.0f}"
    return f"{text} ({100 * fmean(turned):.0f})" if turned else text


def _diverged(cells: Sequence[Cell]) -> str:
    gone = [cell.step for cell in cells if cell.nonfinite]
    return f"{len(gone)} of {len(cells)}, by step {min(gone)}" if gone else MISSING
