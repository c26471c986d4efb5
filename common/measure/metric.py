"""What a metric declares, and what tables and sweeps make of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "target"]
Formula = Literal["mean", "max", "tow"]
Row = Mapping[str, float | None]
_ARROWS = {"higher": "↑", "lower": "↓", "target": "→ Retrain"}


@dataclass(frozen=True)
class MetricSpec:
    """A metric as tables and records know it.

    Attributes:
        name: Key in records, such as ``ua``.
        better: Direction of good; ``target`` means the retrained model's value is the goal.
        title: Column head.
        doc: One sentence that says what is measured, on what.
        digits: Decimals in tables.
        calibration: What Retrain's own value says about the other columns, as a sentence with
            ``{}`` for the value; empty where it says nothing.
        collapsed: What a collapsed model scores, which gives one answer to everything.
        silent: When the number says nothing.
    """

    name: str
    better: Better
    title: str
    unit: str = "%"
    doc: str = ""
    digits: int = 1
    calibration: str = ""
    collapsed: str = ""
    silent: str = ""

    def __post_init__(self) -> None:
        assert self.better in _ARROWS, f"{self.name}: better must be one of {[*_ARROWS]}"

    @property
    def arrow(self) -> str:
        """``↑``, ``↓`` or ``→ Retrain``."""
        return _ARROWS[self.better]


@dataclass(frozen=True)
class GapColumn:
    """A further column of a table that is derived from gaps to Retrain.

    Attributes:
        name: Key in derived tables, such as ``max_gap``.
        title: Column head with its arrow.
        formula: ``mean`` or ``max`` of the absolute gaps, or ``tow``: product of 1 - |gap| / 100.
        metrics: What the formula takes; the rule's own metrics when empty.
        digits: Decimals in tables.
    """

    name: str
    title: str
    formula: Formula
    metrics: tuple[str, ...] = ()
    digits: int = 1

    @property
    def doc(self) -> str:
        """The formula in words, as the rest of a sentence that begins with the head."""
        over = f" over {', '.join(self.metrics)}" if self.metrics else ""
        if self.formula == "tow":
            return f"is the product of 1 - |gap| / 100{over}: 1 is Retrain"
        return f"is the {'mean' if self.formula == 'mean' else 'largest'} |gap|{over}"


MAX_GAP = GapColumn("max_gap", "max gap ↓", "max")


@dataclass(frozen=True)
class SweepAxes:
    """What a sweep judges: three metrics of a benchmark.

    Attributes:
        forgotten: What unlearning shall bring down, such as accuracy on the forget set.
        retained: What it shall leave on the retain set.
        utility: What it shall leave on data that the model never saw.
        tolerances: Of the default rule, in the units and the order of these three.
        also: Further metrics that every cell notes.
        parts: The parts that these metrics need; all when empty.
        as_trial: Whether they need no more than a trial's scores, such as no generated texts.
        unmeasured: Whether they follow from scores alone, without what the benchmark's identity
            says of ``measure``.
    """

    forgotten: str
    retained: str
    utility: str
    tolerances: tuple[float, float, float]
    also: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    as_trial: bool = False
    unmeasured: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics of a cell."""
        return (self.forgotten, self.retained, self.utility, *self.also)
