"""Leaderboard -> terminal, Markdown, CSV and JSON; pages and pictures: :mod:`benchmarks.page`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from benchmarks import audit_table
from benchmarks.leaderboard import BoardRow, Leaderboard
from benchmarks.sweep import short, tuning_json, tuning_lines, tuning_table, tuning_text
from benchmarks.tables import FLOOR, markdown_table
from common.metrics import Summary

COMPACT_COLUMNS = 4
DIVERGED = "✗n: n of the row's seeds diverged; they are in no mean."
NEGLIGIBLE = 0.005
"""Differences of AG that two decimals do not show are none, however small their spread."""
MARKS: Mapping[str | None, str] = {"inside": "≈", "unclear": "?", "outside": "", None: ""}
HEADS: Mapping[str, str] = {
    "ag2": "AG2 ↓",
    "max_gap": "max gap ↓",
    "tow": "ToW ↑",
    "tow_mia": "ToW-MIA ↑",
}
DIGITS: Mapping[str, int] = {"ag2": 2, "max_gap": 1, "tow": 3, "tow_mia": 3}


def legend(board: Leaderboard) -> str:
    """How to read the main table."""
    return (
        "Goal of every → column: the value of Retrain. Cells: mean ± std over seeds, then the "
        f"signed gap to the seed's Retrain. {board.rule.words} ≈ inside the noise floor (no "
        "further from Retrain than a second Retrain); ? outside on average, but too few seeds to "
        "tell (95 % t-interval of the paired difference reaches 0)."
    )


def value_cell(row: BoardRow, name: str, digits: int = 1, *, spread: bool = True) -> str:
    """``97.0±0.9 +0.5``: mean, spread and signed gap."""
    summary = row.metrics.get(name)
    if summary is None:
        return "–"
    text = f"{summary.mean:.{digits}f}"
    if spread and summary.std is not None:
        text += f"±{summary.std:.{digits}f}"
    gap = row.gaps.get(name)
    if gap is not None and not (row.method == "retrain" and row.label != FLOOR):
        text += f" {gap.mean:+.{digits}f}"
    return text


def derived_cell(row: BoardRow, name: str, digits: int = 2) -> str:
    """``1.43±0.43``."""
    summary = row.derived.get(name)
    return "–" if summary is None else plain(summary, digits)


def mean_cell(row: BoardRow, name: str, digits: int) -> str:
    """The mean alone; spreads are in the JSON."""
    summary = row.derived.get(name)
    return "–" if summary is None else f"{summary.mean:.{digits}f}"


def plain(summary: Summary, digits: int = 2) -> str:
    """``mean±std``."""
    text = f"{summary.mean:.{digits}f}"
    return text if summary.std is None else f"{text}±{summary.std:.{digits}f}"


def status_cell(row: BoardRow, planned: int) -> str:
    """n, and how many of them diverged."""
    if row.inapplicable:
        return "n/a"
    text = f"{len(row.seeds)}" if len(row.seeds) == planned else f"{len(row.seeds)}/{planned}"
    return text + (f" ({len(row.diverged)} diverged)" if row.diverged else "")


def main_columns(board: Leaderboard, *, compact: bool = False) -> list[str]:
    """Heads of the main table; ``compact`` fits 80 columns."""
    specs = [board.specs[name] for name in _columns(board, compact=compact)]
    titles = [f"{spec.title} {spec.arrow[0]}" for spec in specs]
    if compact:
        return ["method", *titles, f"{board.rule.title} ↓"]
    heads = ["method", "n", *titles, f"{board.rule.title} ↓", ""]
    heads += [HEADS[name] for name in board.rule.also]
    return heads + (["trials"] if board.trials else [])


def _columns(board: Leaderboard, *, compact: bool) -> list[str]:
    """Metrics of the main table; where there are too many, the compact one keeps the rule's."""
    names = list(board.suite.spec.columns)
    if compact and len(names) > COMPACT_COLUMNS:
        names = [name for name in names if name in board.rule.compact] or names
    return names[:COMPACT_COLUMNS] if compact else names


def main_rows(board: Leaderboard, *, compact: bool = False) -> list[list[str]]:
    """Cells of the main table."""
    return [
        _compact_cells(board, row) if compact else _full_cells(board, row) for row in board.rows
    ]


def _compact_cells(board: Leaderboard, row: BoardRow) -> list[str]:
    names = _columns(board, compact=True)
    cells = [_short_value_cell(row, name, board.specs[name].digits) for name in names]
    ag = row.derived.get("ag")
    text = "–" if ag is None else f"{ag.mean:.{2 if ag.mean < 10 else 1}f}"
    text += f" {MARKS[row.separability] or ' '}"
    if any(other.diverged for other in board.rows):
        text += f" ✗{len(row.diverged)}" if row.diverged else "   "
    return [row.label, *cells, text]


def _short_value_cell(row: BoardRow, name: str, digits: int) -> str:
    """``97.0 +0.5`` in at most ten characters."""
    text = value_cell(row, name, digits, spread=False)
    gap = row.gaps.get(name)
    value, space, _ = text.partition(" ")
    return f"{value} {gap.mean:+.0f}" if space and gap and abs(gap.mean) >= 9.95 else text


def _full_cells(board: Leaderboard, row: BoardRow) -> list[str]:
    cells = [row.label, status_cell(row, len(board.suite.spec.seeds))]
    names = board.suite.spec.columns
    cells += [value_cell(row, name, board.specs[name].digits) for name in names]
    cells += [derived_cell(row, "ag"), MARKS[row.separability]]
    cells += [mean_cell(row, name, DIGITS[name]) for name in board.rule.also]
    return cells + ([str(row.trials or "–")] if board.trials else [])


BOUND_COLUMNS = [
    "method",
    "‖dW‖/‖W0‖",
    "max |arg|",
    "bound active",
    "logit spread",
    "forget loss",
    "trained %",
    "seconds",
    "chosen by tuning",
]


def bound_rows(board: Leaderboard) -> list[list[str]]:
    """Cells of the second table: did the bound act, and what did a row cost?"""
    rows = []
    for row in board.rows:
        dynamics, cost = row.dynamics, row.cost
        loss = row.metrics.get("forget_loss")
        base, trained = cost.get("base_parameters"), cost.get("trainable_parameters")
        rows.append(
            [
                row.label,
                _number(dynamics.get("last/adapter/delta_ratio"), 3),
                _number(dynamics.get("last/adapter/max_argument"), 3),
                _percent(dynamics.get("last/adapter/bound_active")),
                _number(dynamics.get("last/logits/spread"), 2),
                "–" if loss is None else plain(loss),
                "–" if not base or trained is None else f"{100 * trained / base:.2f}",
                _number(cost.get("seconds"), 1),
                ", ".join(f"{key}={short(value)}" for key, value in row.chosen.items()) or "–",
            ]
        )
    return rows


def gap_table(board: Leaderboard) -> tuple[list[str], list[list[str]]]:
    """Signed gaps and AG with their 95 % t-intervals: heads and rows."""
    names = list(board.suite.spec.columns)
    heads = ["method", *[f"{board.specs[name].title} gap" for name in names], board.rule.title]
    rows = []
    for row in board.rows:
        cells = [_interval(row.gaps.get(name), f"+.{board.specs[name].digits}f") for name in names]
        rows.append([row.label, *cells, _interval(row.derived.get("ag"), ".2f")])
    return heads, rows


def _interval(summary: Summary | None, form: str) -> str:
    if summary is None:
        return "–"
    text = format(summary.mean, form)
    if summary.low is None or summary.high is None:
        return text
    return f"{text} [{summary.low:{form}}, {summary.high:{form}}]"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


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


def further_table(board: Leaderboard) -> tuple[list[str], list[list[str]]]:
    """What was measured beside the main columns: heads and rows."""
    names = [name for name in board.specs if name not in board.suite.spec.columns]
    names = [name for name in names if any(name in row.metrics for row in board.rows)]
    heads = ["method", *[board.specs[name].title for name in names]]
    rows = []
    for row in board.rows:
        cells = [
            plain(row.metrics[n], board.specs[n].digits) if n in row.metrics else "–" for n in names
        ]
        rows.append([row.label, *cells])
    return heads, rows


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
