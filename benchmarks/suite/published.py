"""Numbers that a paper prints: shown beside measured tables, never in them.

``benchmarks/published/*.csv`` holds facts as printed.  Where a table follows from itself (AG from
its own columns) the recomputed value stands beside the printed one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

from stable_forgetting.common.base.config import read_yaml

FOLDER = Path(__file__).parents[1] / "published"
FIGURES = FOLDER / "figures.yaml"
TOLERANCE = 0.03
"""Printed and recomputed AG further apart than rounding of two decimals allows."""


@dataclass(frozen=True)
class PublishedRow:
    """One method of one published table: metric -> (value, std or None)."""

    method: str
    values: dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Printed:
    """One printed number with where it stands.

    Attributes:
        text: As printed.
        std: As printed; empty without.
    """

    table: str
    dataset: str
    model: str
    split: str
    method: str
    metric: str
    text: str
    std: str

    @property
    def number(self) -> float:
        """Its value."""
        return float(self.text)

    @property
    def half_unit(self) -> float:
        """Half a unit of its last digit."""
        exponent = Decimal(self.text).as_tuple().exponent
        assert isinstance(exponent, int)
        return float(Decimal(1).scaleb(exponent)) / 2


def read_printed() -> list[Printed]:
    """Every printed number of every table."""
    values = []
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                line["text"] = line.pop("value")
                if _is_number(line["text"]):
                    values.append(Printed(**line))
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@cache
def read_tables() -> Mapping[str, list[PublishedRow]]:
    """Table label -> rows, in the order of the files, which are read once."""
    tables: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {}
    for line in read_printed():
        std = float(line.std) if line.std else None
        rows = tables.setdefault(line.table, {})
        rows.setdefault(line.method, {})[line.metric] = (line.number, std)
    return {
        label: [PublishedRow(method, values) for method, values in rows.items()]
        for label, rows in tables.items()
    }


def read_figures() -> dict[str, dict[str, str]]:
    """Label of a figure -> its ``title``, and in ``note`` what the suites show in another way."""
    return read_yaml(FIGURES)


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
