"""What a metric declares, and the rule that makes one distance of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "reference"]
Row = Mapping[str, float | None]
_ARROWS = {"higher": "↑", "lower": "↓", "reference": "→ Retrain"}


@dataclass(frozen=True)
class MetricSpec:
    """A metric as tables and records know it.

    Attributes:
        name: Key in records, such as ``ua``.
        better: Direction of good; ``reference`` means the retrained model's value is the goal.
        title: Column head.
        unit: Unit of the number.
        doc: One sentence that says what is measured, on what.
        digits: Decimals in tables.
    """

    name: str
    better: Better
    title: str
    unit: str = "%"
    doc: str = ""
    digits: int = 1

    def __post_init__(self) -> None:
        assert self.better in _ARROWS, f"{self.name}: better must be one of {[*_ARROWS]}"

    @property
    def arrow(self) -> str:
        """``↑``, ``↓`` or ``→ Retrain``."""
        return _ARROWS[self.better]


@dataclass(frozen=True)
class GapRule:
    """How far a row is from Retrain, in one number: what orders a table and what tuning minimises.

    Attributes:
        metrics: All in one unit; AG is the mean of their absolute gaps.
        trial: The same for tuning: nothing that reads test data.
        title: Head of AG's column.
        words: The formula, for legends.
        columns: Main table of a suite that names none; ``metrics`` when empty.
        compact: Columns that a narrow terminal keeps.
        also: Further columns derived from gaps (``ag2``, ``max_gap``, ``tow``, ``tow_mia``).
    """

    metrics: tuple[str, ...]
    trial: tuple[str, ...]
    title: str = "AG"
    words: str = ""
    columns: tuple[str, ...] = ()
    compact: tuple[str, ...] = ()
    also: tuple[str, ...] = ("max_gap",)
