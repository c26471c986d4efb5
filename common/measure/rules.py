"""Rules: how the rows of a table are ordered by gaps or goals, and criteria that rows keep or miss.

This module imports nothing heavy: planning and reporting read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from stable_forgetting.common.measure.gaps import average_gap, charged_gap
from stable_forgetting.common.measure.goal import Goal, References, Role
from stable_forgetting.common.measure.metric import MAX_GAP, GapColumn, Row


@dataclass(frozen=True)
class RowFacts:
    """What a rule may order a row by; means are over the seeds that did not diverge.

    Attributes:
        metrics: Metric -> mean.
        reached: Share of seeds that reach every goal, 0 to 1.
        steps: Mean optimizer steps.
    """

    distance: float
    metrics: Mapping[str, float]
    reached: float
    steps: float


@dataclass(frozen=True)
class Axis:
    """One side of what a row should be: a named set of metrics, all in one unit.

    A row's distance on an axis is the weighted mean of its absolute gaps to Retrain: below and
    beyond Retrain's value count alike.

    Attributes:
        name: Key in derived tables.
        title: Column head.
        weights: Metric -> weight; only their ratios count.
    """

    name: str
    title: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class GapRule:
    """How far a row is from Retrain, in one number: what orders a table and what tuning minimises.

    Attributes:
        metrics: All in one unit; AG is the mean of their charged gaps, or of the axes'. A
            gap is charged with its size, but for those in :attr:`kept`.
        trial: The same for tuning: nothing that reads test data.
        title: Head of AG's column.
        words: The formula, for legends.
        columns: Main table of a suite that names none; ``metrics`` when empty.
        compact: Columns that a narrow terminal keeps.
        also: Further columns derived from gaps.
        axes: Where there are any, AG is the mean of their distances, so that an axis of many
            metrics does not outvote one of few.
        unit: Of AG.
        kept: Metrics of which more than Retrain's is no fault: only what is lost counts.
        drops_noise: Whether a column in which two Retrains lie farther apart than the methods of a
            table from Retrain weighs nothing in that table; for rules without axes.
        doubted: Of ``metrics`` those whose metric card says that they may not rank, and which the
            order keeps all the same.  A report says how the rows stand without them.
    """

    needs: ClassVar[frozenset[Role]] = frozenset({"retrain"})
    goals: ClassVar[tuple[Goal, ...]] = ()
    metrics: tuple[str, ...]
    trial: tuple[str, ...]
    title: str = "AG"
    words: str = ""
    columns: tuple[str, ...] = ()
    compact: tuple[str, ...] = ()
    also: tuple[GapColumn, ...] = (MAX_GAP,)
    axes: tuple[Axis, ...] = ()
    unit: str = "points"
    kept: tuple[str, ...] = ()
    drops_noise: bool = False
    doubted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.drops_noise and self.axes), "columns of an axis share its weight"

    def weights(self, *, trial: bool = False) -> dict[str, float]:
        """Metric -> what its charged gap counts for in AG; they add up to 1.

        An axis of which nothing is measured is left out; its others share its weight.
        """
        names = self.trial if trial else self.metrics
        groups = [axis.weights for axis in self.axes] or [dict.fromkeys(names, 1.0)]
        present = [{m: w for m, w in group.items() if m in names} for group in groups]
        present = [group for group in present if group]
        return {
            metric: weight / math.fsum(group.values()) / len(present)
            for group in present
            for metric, weight in group.items()
        }

    def contributions(
        self, row: Row, references: References, *, trial: bool = False
    ) -> dict[str, float] | None:
        """Metric -> its part of AG, which is their sum; None while a side is unknown."""
        parts = {}
        for metric, weight in self.weights(trial=trial).items():
            distance = charged_gap(row, references.retrain or {}, metric, self.kept)
            if distance is None:
                return None
            parts[metric] = weight * distance
        return parts

    def distance(self, row: Row, references: References, *, trial: bool) -> float | None:
        """AG: the mean charged gap to Retrain; in a trial over :attr:`trial`."""
        if self.axes:
            parts = self.contributions(row, references, trial=trial)
            return None if parts is None else math.fsum(parts.values())
        if references.retrain is None:
            return None
        names = self.trial if trial else self.metrics
        return average_gap(row, references.retrain, names, self.kept)

    def order(self, row: RowFacts) -> tuple[float, ...]:
        """By distance."""
        return (row.distance,)


@dataclass(frozen=True)
class GoalRule:
    """Orders rows by goals: who reaches them, at which utility, after how many steps.

    The distance, which tuning minimises, is 100 times the mean :meth:`Goal.excess` plus the utility
    lost against Original, in the utility's unit: 0 for a model that reaches every goal and lost
    nothing.

    Attributes:
        goals: What has to be reached.
        utility: Metric of what the model should keep; higher is better.
        trial_utility: The metric that stands for it in tuning, where the utility itself is not
            measured in a trial; the utility itself when empty.
        title: Head of the distance's column.
        columns: Main table of a suite that names none; the goals' metrics and utility when empty.
        compact: Columns that a narrow terminal keeps.
    """

    goals: tuple[Goal, ...]
    utility: str
    trial_utility: str = ""
    title: str = "to goal"
    columns: tuple[str, ...] = ()
    compact: tuple[str, ...] = ()
    also: ClassVar[tuple[GapColumn, ...]] = ()
    axes: ClassVar[tuple[Axis, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ()
    drops_noise: ClassVar[bool] = False
    unit: ClassVar[str] = "points"

    @property
    def metrics(self) -> tuple[str, ...]:
        """What the main table shows: the goals' metrics, then the utility."""
        return (*dict.fromkeys(goal.metric for goal in self.goals), self.utility)

    @property
    def needs(self) -> frozenset[Role]:
        """The references that a suite must hold: Original, and what the goals ask for."""
        return frozenset[Role]({"original"}).union(*(goal.needs for goal in self.goals))

    @property
    def words(self) -> str:
        """The rule in words, for legends."""
        goals = "; ".join(goal.words for goal in self.goals)
        return (
            f"{self.title} = 100 x mean share by which a goal is missed + {self.utility} lost "
            f"against Original; goals: {goals}. Rows are ordered by the share of seeds that reach "
            f"every goal, then by {self.utility}, then by steps."
        )

    def reached(self, row: Row, references: References) -> bool | None:
        """Whether every goal is reached; None while one is unknown."""
        answers = [goal.reached(row, references) for goal in self.goals]
        if False in answers:
            return False
        return None if None in answers else True

    def distance(self, row: Row, references: References, *, trial: bool) -> float | None:
        """The distance to the goals (see the class); None while something is unknown."""
        excesses = [goal.excess(row, references) for goal in self.goals]
        utility = (self.trial_utility if trial else "") or self.utility
        lost = _lost(row, references.original, utility)
        if lost is None or any(excess is None for excess in excesses):
            return None
        total = math.fsum(excess for excess in excesses if excess is not None)
        return 100.0 * total / len(excesses) + lost

    def contributions(self, row: Row, references: References) -> None:
        """None: a distance to goals is no mean over metrics."""

    def order(self, row: RowFacts) -> tuple[float, ...]:
        """By the share of seeds that reach every goal, then utility, then steps."""
        return (-row.reached, -row.metrics.get(self.utility, -math.inf), row.steps)


@dataclass(frozen=True)
class TargetRule:
    """How far a trial is from what Original says of data that no training saw: no Retrain is read.

    The mean of a :class:`GapRule` over the metrics that have a target.

    Attributes:
        targets: Metric of a trial -> Original's metric that is its target, or a number that Retrain
            has by construction.
        part: Part of a split, of which no training saw a sample, in whose place of the forget set
            Original is measured; its own forget set when empty.
        axes: As in a :class:`GapRule`.
    """

    needs: ClassVar[frozenset[Role]] = frozenset({"original"})
    title: ClassVar[str] = "mean |gap| to values of Original"
    targets: Mapping[str, str | float]
    part: str = ""
    axes: tuple[Axis, ...] = ()

    def distance(self, row: Row, references: References, *, trial: bool) -> float | None:
        """The mean absolute gap to the targets; None while one is unknown."""
        known = references.original or {}
        wanted = {k: known.get(v) if isinstance(v, str) else v for k, v in self.targets.items()}
        rule = GapRule(metrics=(), trial=tuple(wanted), axes=self.axes)
        return rule.distance(row, References(retrain=wanted), trial=True)

    @property
    def words(self) -> str:
        """The targets in words, for legends."""
        own = {
            k: f"{v} of Original" if isinstance(v, str) else f"{v:g}"
            for k, v in self.targets.items()
        }
        text = ", ".join(f"{name} to {value}" for name, value in own.items())
        return f"{text}; Original with {self.part} in the place of forget" if self.part else text


Rule = GapRule | GoalRule
"""What orders the rows of a table, and what tuning minimises."""


def stopping_goals(rule: Rule) -> tuple[Goal, ...]:
    """The goals at which a training may stop: reached from above, and not known from Retrain."""
    return tuple(g for g in rule.goals if g.reach == "below" and "retrain" not in g.needs)


def _lost(row: Row, original: Row | None, metric: str) -> float | None:
    ours, before = row.get(metric), None if original is None else original.get(metric)
    return None if ours is None or before is None else max(0.0, before - ours)


@dataclass(frozen=True)
class Criterion:
    """One rule of a rule set."""

    name: str
    goal: Goal


@dataclass(frozen=True)
class RuleSet:
    """A named set of pass-or-fail rules, as a paper states them.

    Attributes:
        name: Such as ``muse``.
        source: Where the rules stand.
        criteria: All of them must hold for a pass.
    """

    name: str
    source: str
    criteria: tuple[Criterion, ...]

    def judge(self, row: Row, references: References) -> Mapping[str, bool | None]:
        """Criterion -> whether it holds; None while it is unknown."""
        return {rule.name: rule.goal.reached(row, references) for rule in self.criteria}

    @property
    def words(self) -> str:
        """The rules in words, for legends."""
        rules = "; ".join(f"{rule.name}: {rule.goal.words}" for rule in self.criteria)
        return f"{self.name} ({self.source}): {rules}"
