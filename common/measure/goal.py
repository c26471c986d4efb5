"""Goals: what a metric of an unlearned model should come to.

Three kinds of goal: the value of the seed's Retrain, a value measured on Original (such as the
memorisation of text that it never saw), and a constant with its source.  This module imports
nothing heavy: planning and reporting read it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from stable_forgetting.common.measure.metric import Row

Reach = Literal["below", "above"]
Role = Literal["original", "retrain"]
_SMALLEST = 1e-12


@dataclass(frozen=True)
class References:
    """Metrics of the reference models of one seed.

    Attributes:
        original: Of the model before unlearning; None where it is not measured yet.
        retrain: Of the model retrained without the forget set; None where there is none.
    """

    original: Row | None = None
    retrain: Row | None = None

    def of(self, role: Role) -> Row | None:
        """The metrics of one reference."""
        return self.original if role == "original" else self.retrain


class Goal(ABC):
    """What one metric should come to.

    Attributes:
        reach: ``below`` or ``above``: on which side of the value the goal is reached; the value
            itself is not enough, unless the goal is :attr:`inclusive`.
        inclusive: Whether the value itself reaches the goal.
        needs: The reference models whose metrics the value comes from.
    """

    metric: str
    reach: Reach
    inclusive: bool = False
    needs: ClassVar[frozenset[Role]]

    @abstractmethod
    def value(self, references: References) -> float | None:
        """The goal's value for one seed, in the metric's unit; None while it is unknown."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The goal in words, for legends."""

    @property
    def side(self) -> str:
        """Where the value has to lie, in words."""
        if not self.inclusive:
            return self.reach
        return "at most" if self.reach == "below" else "at least"

    def reached(self, row: Row, references: References) -> bool | None:
        """Whether a model reaches the goal; None while a side is unknown."""
        ours, value = row.get(self.metric), self.value(references)
        if ours is None or value is None:
            return None
        if ours == value:
            return self.inclusive
        return ours < value if self.reach == "below" else ours > value

    def excess(self, row: Row, references: References) -> float | None:
        """How far a model is on the wrong side, as a share of the value; 0 where it is not."""
        ours, value = row.get(self.metric), self.value(references)
        if ours is None or value is None:
            return None
        over = ours - value if self.reach == "below" else value - ours
        return max(0.0, over) / max(abs(value), _SMALLEST)


@dataclass(frozen=True)
class RetrainGoal(Goal):
    """The value of the seed's Retrain, from one side.

    Attributes:
        share: The value is this share of it.
    """

    needs: ClassVar[frozenset[Role]] = frozenset({"retrain"})
    metric: str
    reach: Reach = "below"
    share: float = 1.0
    inclusive: bool = False

    def value(self, references: References) -> float | None:
        """That share of Retrain's value of the same metric."""
        theirs = None if references.retrain is None else references.retrain.get(self.metric)
        return None if theirs is None else self.share * theirs

    @property
    def words(self) -> str:
        """The goal in words."""
        share = "" if self.share == 1 else f"{self.share:g} x "
        return f"{self.metric} {self.side} {share}Retrain's"


@dataclass(frozen=True)
class MeasuredGoal(Goal):
    """A value that is measured on Original, such as the same metric on text it never saw.

    Attributes:
        on: The metric of Original that is the value.
        share: The value is this share of it.
        least: The smallest value that is a goal.
    """

    needs: ClassVar[frozenset[Role]] = frozenset({"original"})
    metric: str
    on: str
    reach: Reach = "below"
    share: float = 1.0
    least: float = -math.inf

    def value(self, references: References) -> float | None:
        """Original's value of :attr:`on`."""
        measured = None if references.original is None else references.original.get(self.on)
        return None if measured is None else max(self.least, self.share * measured)

    @property
    def words(self) -> str:
        """The goal in words."""
        share = "" if self.share == 1 else f"{self.share:g} x "
        least = "" if math.isinf(self.least) else f" (at least {self.least:g})"
        return f"{self.metric} {self.reach} {share}{self.on} of Original{least}"


@dataclass(frozen=True)
class ConstantGoal(Goal):
    """A constant.

    Attributes:
        constant: In the metric's unit.
        source: Where the number stands, for legends.
    """

    needs: ClassVar[frozenset[Role]] = frozenset()
    metric: str
    constant: float
    source: str
    reach: Reach = "below"
    inclusive: bool = False

    def value(self, references: References) -> float | None:
        """The constant."""
        return self.constant

    @property
    def words(self) -> str:
        """The goal in words."""
        return f"{self.metric} {self.side} {self.constant:g} ({self.source})"
