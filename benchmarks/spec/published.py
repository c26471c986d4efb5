"""Numbers that a paper prints: shown beside measured tables, never in them.

``benchmarks/published/*.csv`` holds facts as printed.  Where a table follows from itself (AG from
its own columns) the recomputed value stands beside the printed one.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "published"
TOLERANCE = 0.03
"""Printed and recomputed AG further apart than rounding of two decimals allows."""


@dataclass(frozen=True)
class PublishedRow:
    """One method of one published table: metric -> (value, std or None)."""

    method: str
    values: dict[str, tuple[float, float | None]]


def read_tables() -> dict[str, list[PublishedRow]]:
    """Table label -> rows, in the order of the files."""
    tables: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {}
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                try:
                    value = float(line["value"])
                except ValueError:
                    continue
                std = float(line["std"]) if line["std"] else None
                rows = tables.setdefault(line["table"], {})
                rows.setdefault(line["method"], {})[line["metric"]] = (value, std)
    return {
        label: [PublishedRow(method, values) for method, values in rows.items()]
        for label, rows in tables.items()
    }


def recomputed_gap(row: PublishedRow, reference: PublishedRow) -> float | None:
    """Mean |gap| to the table's own Retrain over its (FA or UA), RA, TA, MIA columns."""
    names = [
        name
        for name in ("FA", "UA", "RA", "TA", "MIA")
        if name in row.values and name in reference.values
    ]
    if len(names) != 4:
        return None
    return math.fsum(abs(row.values[n][0] - reference.values[n][0]) for n in names) / 4
