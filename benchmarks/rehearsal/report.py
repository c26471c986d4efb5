"""A rehearsal as a table."""

from __future__ import annotations

from collections.abc import Sequence

from stable_forgetting.benchmarks.rehearsal.suite import WARNING
from stable_forgetting.benchmarks.rehearsal.work import Rehearsed
from stable_forgetting.benchmarks.report.section import Section, table

HEADS = ["row", "steps", "taken", "first rate", "last rate", "adapters", "precision", "s", ""]


def section(name: str, rows: Sequence[Rehearsed], notes: Sequence[str]) -> Section:
    """One line per row; ``ok``, or what went wrong."""
    cells = [
        [
            row.label,
            "" if row.planned is None else str(row.planned),
            str(row.taken) if row.taken else "",
            *([f"{rate:.3g}" for rate in row.rates] or ["", ""]),
            str(row.layers) if row.layers else "",
            row.precision,
            f"{row.seconds:.1f}",
            row.error or _not_applicable(row) or "ok",
        ]
        for row in rows
    ]
    failed = sum(bool(row.error) for row in rows)
    seconds = sum(row.seconds for row in rows)
    absent = sum(bool(row.inapplicable) for row in rows)
    words = f"{len(rows) - failed - absent} of {len(rows)} went well, in {seconds:.0f} s."
    words += f" {absent} do not apply." if absent else ""
    return Section(f"{name} ({WARNING})", (*notes, words), table(HEADS, cells, words=True))


def _not_applicable(row: Rehearsed) -> str:
    return row.inapplicable and f"not applicable: {row.inapplicable}"
