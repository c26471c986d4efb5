"""Leaderboard -> terminal, Markdown, CSV and JSON.

Pages and pictures: :mod:`benchmarks.leaderboard.picture`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.audits import report as audit_table
from benchmarks.audits.report import print_audits
from benchmarks.leaderboard.board import Leaderboard
from benchmarks.leaderboard.sweep import tuning_json, tuning_lines, tuning_table, tuning_text
from benchmarks.leaderboard.tables import (
    BOUND_COLUMNS,
    NEGLIGIBLE,
    bound_rows,
    further_table,
    gap_table,
    main_columns,
    main_rows,
)
from benchmarks.report.cells import plain
from benchmarks.report.table import markdown_table
from common.measure.gaps import Summary

if TYPE_CHECKING:
    from benchmarks.spec.resolve import ResolvedSuite
    from common.protocol.benchmark import Runtime

DIVERGED = "✗n: n of the row's seeds diverged; they are in no mean."


def legend(board: Leaderboard) -> str:
    """How to read the main table."""
    return (
        "Goal of every → column: the value of Retrain. Cells: mean ± std over seeds, then the "
        f"signed gap to the seed's Retrain. {board.rule.words} ≈ inside the noise floor (no "
        "further from Retrain than a second Retrain); ? outside on average, but too few seeds to "
        "tell (95 % t-interval of the paired difference reaches 0)."
    )


def floor_line(board: Leaderboard) -> str:
    """The noise floor in words."""
    if board.floor.summary is None:
        return "Noise floor: unknown (retrains: 2 gives it)."
    seeds = ", ".join("?" if v is None else f"{v:.2f}" for v in board.floor.per_seed)
    return (
        f"Noise floor ({board.rule.title} of a second Retrain against the first): "
        f"{plain(board.floor.summary)} [{seeds}]."
    )


def attack_line(board: Leaderboard) -> str:
    """How much signal the headline MIA had on Retrain."""
    retrain = next((row for row in board.rows if row.method == "retrain"), None)
    summary = retrain.metrics.get("mia_bacc") if retrain else None
    if summary is None:
        return ""
    return (
        f"Balanced accuracy of the MIA's SVC on Retrain's own data: {plain(summary, 1)} % "
        "(50: no signal, the MIA column is then threshold noise)."
    )


def divergence_lines(board: Leaderboard) -> list[str]:
    """Which runs diverged, and where."""
    return [
        f"{row.label}, seed {seed}: {detail}"
        for row in board.rows
        for seed, detail in row.diverged.items()
    ]


def inapplicable_lines(board: Leaderboard) -> list[str]:
    """Which rows say nothing about this benchmark, and why."""
    return [
        f"{row.label}: not applicable ({row.inapplicable})"
        for row in board.rows
        if row.inapplicable
    ]


def comparison_lines(board: Leaderboard) -> list[str]:
    """Paired differences in words."""
    lines = []
    for item in board.comparisons:
        summary = item.difference.summary
        p = item.difference.p_value
        interval = (
            ""
            if summary.low is None or summary.high is None
            else (f", 95 % [{summary.low:+.2f}, {summary.high:+.2f}]")
        )
        reads = "no difference shown"
        if abs(summary.mean) < NEGLIGIBLE:
            reads = "the same to two decimals"
        elif summary.low is not None and summary.high is not None:
            if summary.high < 0:
                reads = f"{item.first} is closer to Retrain"
            elif summary.low > 0:
                reads = f"{item.second} is closer to Retrain"
        tail = "" if p is None else f", p {p:.2g}"
        lines.append(
            f"{board.rule.title} of {item.first} − {item.second}: {summary.mean:+.2f}"
            f"{interval}{tail}, n {summary.n}: {reads}."
        )
    return lines


def to_markdown(board: Leaderboard) -> str:
    """The whole report as Markdown."""
    spec = board.suite.spec
    seeds = ", ".join(str(seed) for seed in spec.seeds)
    parts = [f"# {spec.suite} (v{spec.version}, measured)", spec.title, _provenance(board)]
    if not board.complete:
        parts.append(f"**Incomplete: {board.missing} records are missing.**")
    parts += [
        f"Seeds {seeds}. {legend(board)}",
        markdown_table(main_columns(board), main_rows(board)),
        floor_line(board),
        attack_line(board),
    ]
    lines = comparison_lines(board)
    if lines:
        parts.append("Paired comparisons:\n\n" + "\n".join(f"- {line}" for line in lines))
    lost = divergence_lines(board)
    if lost:
        parts.append("Diverged:\n\n" + "\n".join(f"- {line}" for line in lost))
    outside = inapplicable_lines(board)
    if outside:
        parts.append("\n".join(f"- {line}" for line in outside))
    parts += [
        "## Signed gaps to Retrain, with 95 % t-intervals",
        markdown_table(*gap_table(board)),
        "## Did the bound act, and what did it cost?",
        markdown_table(BOUND_COLUMNS, bound_rows(board)),
        "`max |arg|` is the largest |omega A B^T| (the argument of phi); `bound active` is "
        "the share of entries above 0.5, where sine, tanh and identity begin to differ.",
    ]
    parts += ["## Further measurements", markdown_table(*further_table(board))]
    if board.audits:
        parts += ["## Audits", audit_table.to_markdown(board.audits)]
    if board.trials:
        parts += ["## Tuning", tuning_text(board)]
        parts.append("\n".join(f"- {line}" for line in tuning_lines(board)))
        parts.append(markdown_table(*tuning_table(board)))
    if spec.notes:
        parts.append(f"Notes: {spec.notes}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _provenance(board: Leaderboard) -> str:
    if not board.records:
        return ""
    record = board.records[0][1]
    git = record.environment.get("git", {})
    commit = git.get("commit", "unknown")[:12] + (" (dirty)" if git.get("dirty") else "")
    versions = record.environment.get("packages", {})
    return (
        f"Data: {record.data.get('provenance', '?')}, digest {record.data['digest'][:12]}. "
        f"Commit {commit}, torch {versions.get('torch', '?')}, timm {versions.get('timm', '?')}."
    )


def to_csv(board: Leaderboard) -> str:
    """One line per record: label, seed, replicate, status, every metric."""
    names = list(board.specs)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["row", "method", "seed", "replicate", "status", *names])
    for label, record in board.records:
        values = [record.metrics.get(name) for name in names]
        writer.writerow(
            [
                label,
                record.method,
                record.seed,
                record.replicate,
                record.status,
                *["" if value is None else repr(value) for value in values],
            ]
        )
    return stream.getvalue()


def to_json(board: Leaderboard) -> dict[str, Any]:
    """Everything as plain numbers."""

    def pack(summaries: Mapping[str, Summary]) -> dict[str, Any]:
        return {name: vars(summary) for name, summary in summaries.items()}

    rows = [
        {
            "row": row.label,
            "method": row.method,
            "seeds": row.seeds,
            "diverged": {str(s): d for s, d in row.diverged.items()},
            "inapplicable": row.inapplicable or None,
            "separability": row.separability,
            "metrics": pack(row.metrics),
            "gaps": pack(row.gaps),
            "derived": pack(row.derived),
            "ag_per_seed": {str(s): v for s, v in row.ag_per_seed.items()},
            "dynamics": row.dynamics,
            "cost": row.cost,
            "trials": row.trials,
            "chosen": row.chosen,
            "edges": list(row.edges),
        }
        for row in board.rows
    ]
    floor = board.floor.summary
    return {
        "suite": board.suite.name,
        "version": board.suite.spec.version,
        "kind": "measured",
        "complete": board.complete,
        "floor": None if floor is None else {**vars(floor), "per_seed": board.floor.per_seed},
        "rows": rows,
        "tuning": tuning_json(board),
        "audits": audit_table.to_json(board.audits),
    }


WIDE = 146
"""Columns that the full main table needs; a narrower terminal gets the compact one."""


def print_board(console: Any, board: Leaderboard) -> None:
    """The leaderboard, its legend, its floor and its comparisons."""
    from benchmarks.leaderboard import report as render
    from benchmarks.report.table import rich_table

    spec = board.suite.spec
    title = f"{spec.suite} - {spec.title}" if spec.title else spec.suite
    console.print()
    compact = console.width < WIDE
    heads = render.main_columns(board, compact=compact)
    rows = render.main_rows(board, compact=compact)
    console.print(rich_table(title, heads, rows, tight=compact))
    console.print(render.legend(board), style="dim", highlight=False, markup=False)
    if compact and any(row.diverged for row in board.rows):
        console.print(render.DIVERGED, style="dim", highlight=False, markup=False)
    for line in (render.floor_line(board), render.attack_line(board)):
        if line:
            console.print(line, highlight=False, markup=False)
    for line in render.divergence_lines(board):
        console.print(f"  diverged: {line}", style="yellow", highlight=False, markup=False)
    for line in render.inapplicable_lines(board):
        console.print(f"  {line}", style="dim", highlight=False, markup=False)
    for line in render.comparison_lines(board):
        console.print(f"  {line}", highlight=False, markup=False)
    if not board.complete:
        console.print(f"[yellow]Incomplete: {board.missing} records are missing.[/yellow]")
    if board.audits:
        console.print()
        print_audits(console, board.audits)


def print_places(console: Any, suite: ResolvedSuite, runtime: Runtime) -> None:
    """Where everything was written."""
    folder = _short_path(runtime.store / "suites" / suite.name)
    boards = _short_path(runtime.store / "tensorboard" / suite.name)
    console.print(
        f"\n[bold]Report[/bold]       {folder}/LEADERBOARD.md (.html, .csv, .json, .svg)",
        highlight=False,
    )
    console.print(f"[bold]Records[/bold]      {folder}/records.jsonl", highlight=False)
    console.print(f"[bold]TensorBoard[/bold]  tensorboard --logdir {boards}", highlight=False)


def _short_path(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
