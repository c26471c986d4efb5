"""Dimensions of a search space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from common.base.config import Strict

SHARE_OF_EDGE = 0.1
"""A value this near to an end of its range (as a share of it) lies at the edge."""


class Dimension(Strict):
    """One parameter of a space: a range ``{low, high, log}`` or a list of values.

    Attributes:
        low: Lower bound, included.
        high: Upper bound, included.
        log: Draw the logarithm uniformly.
        choices: The values, for a parameter without a range.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"choices": value}
        if not isinstance(value, Mapping | Dimension):
            raise ValueError("write {low: 1e-4, high: 1e-2, log: true} or a list of values")
        return value

    @model_validator(mode="after")
    def _range_or_choices(self) -> Dimension:
        if self.choices is not None:
            if not self.choices or self.low is not None or self.high is not None or self.log:
                raise ValueError("give low and high, or a list of at least one value")
        elif self.low is None or self.high is None:
            raise ValueError("a range needs low and high")
        elif self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}; swap or widen")
        elif self.log and self.low <= 0:
            raise ValueError(f"log: true needs low above 0, not {self.low:g}")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """Bounds of a range."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def at_edge(self, value: Any) -> bool:
        """Whether a value is an outermost number of a list, or within a tenth of a range's end."""
        if self.choices is not None:
            numbers = [_number(choice) for choice in self.choices]
            values = [number for number in numbers if number is not None]
            ends = {min(values), max(values)} if len(values) == len(numbers) else set()
            return len(ends) == 2 and _number(value) in ends
        scale = math.log if self.log else float
        low, high = map(scale, self.ends)
        share = (scale(value) - low) / (high - low)
        return not SHARE_OF_EDGE < share < 1 - SHARE_OF_EDGE

    def __str__(self) -> str:
        if self.choices is not None:
            return "of " + ", ".join(map(str, self.choices))
        low, high = self.ends
        return f"{low:g} to {high:g}" + (" (log)" if self.log else "")


def _number(value: Any) -> float | None:
    """A number, or text such as ``1e-3`` (which YAML does not read as one)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
