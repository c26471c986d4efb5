"""What an audit returns: measures with intervals, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from common.base.errors import UserError

if TYPE_CHECKING:
    pass


CONFIDENCE = 0.95
PERCENT = (0.0, 100.0)
NOT_NEGATIVE = (0.0, None)
NOT_APPLICABLE = "not applicable"


class NotApplicable(UserError):
    """The audit has no meaning here (another scenario, no adapter)."""

    @property
    def reason(self) -> str:
        """What a table shows instead of numbers."""
        return f"{NOT_APPLICABLE}: {self}"


class TooFew(NotApplicable):
    """The audit has a meaning here, but not with so few models or samples."""

    @property
    def reason(self) -> str:
        """What a table shows instead of numbers."""
        return str(self)


@dataclass(frozen=True)
class Measure:
    """A number with its interval.

    Attributes:
        value: The estimate; None if undefined.
        low: Lower end of the 95 % interval; None where there is none.
        high: Upper end.
        interval: Which interval, and over what it varies.
        n: Independent units behind it.
        note: What a reader must know, such as "too few shadows".
        bounds: Smallest and largest possible value, which an interval over seeds never leaves.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    interval: str = ""
    n: int = 0
    note: str = ""
    bounds: tuple[float | None, float | None] = (None, None)

    def __post_init__(self) -> None:
        for number in (self.value, self.low, self.high):
            assert number is None or math.isfinite(number), f"{number} cannot be stored"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measure:
        """What :meth:`to_json` gave."""
        return cls(**{**data, "bounds": tuple(data["bounds"])})

    def clipped(self, end: float | None) -> float | None:
        """An interval's end, moved inside the bounds."""
        if end is None:
            return None
        lowest, highest = self.bounds
        end = end if lowest is None else max(end, lowest)
        return end if highest is None else min(end, highest)


Measures = dict[str, Measure]
