"""What an audit is, what it is given, and the measure with interval that it returns.

Importing this module and the audits' own imports no torch: ``unlearn attack --list`` reads classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from stable_forgetting.common import data
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError, UserError
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.parts import PARTS, Part, utility_parts
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.family import ModelFamily
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    def from_json(cls, fields: Mapping[str, Any]) -> Measure:
        """What :meth:`to_json` gave."""
        return cls(**{**fields, "bounds": tuple(fields["bounds"])})

    def clipped(self, end: float | None) -> float | None:
        """An interval's end, moved inside the bounds."""
        if end is None:
            return None
        lowest, highest = self.bounds
        end = end if lowest is None else max(end, lowest)
        return end if highest is None else min(end, highest)


Measures = dict[str, Measure]


@runtime_checkable
class Featured(Protocol):
    """A benchmark that says which features enter the head."""

    def features(self, model: nn.Module, batch: data.Batch) -> Tensor:
        """(N, d) penultimate features."""


@dataclass
class AuditTask:
    """One stored model, and what is needed to probe it.

    Attributes:
        load: Makes a fresh copy of the stored model, adapters merged.
        load_original: Makes a fresh copy of the model before unlearning.
        adapted: Whether the stored model is an adapter beside Original's weights.
        family: What is known of the model: forward, logits, head.
        collect: (model, indices) -> scores; puts the model into eval mode.
        collect_correct: Their ``correct`` alone, (N,) float32, bit for bit, which costs less.
        features: (model, batch) -> (N, d) penultimate features; None takes the head's input.
        recipe: How Original was trained.
        batch_size: Samples per forward.
        seed: Of draws.
        load_reference: Makes a fresh copy of a Retrain other than the stored model; None without.
        stored: ``model``, ``original``, ``reference`` -> the key of its stage, if it has one.
    """

    load: Callable[[], nn.Module]
    load_original: Callable[[], nn.Module]
    adapted: bool
    source: data.Source
    split: ForgetSplit
    family: ModelFamily
    collect: Callable[[nn.Module, np.ndarray], Scores]
    collect_correct: Callable[[nn.Module, np.ndarray], np.ndarray]
    features: Callable[[nn.Module, data.Batch], Tensor] | None
    recipe: FitConfig
    batch_size: int
    seed: int
    load_reference: Callable[[], nn.Module] | None = None
    stored: Mapping[str, str] = field(default_factory=dict)

    def draw(self, part: str, count: int | None, *names: str) -> np.ndarray:
        """Up to ``count`` indices of a part by hash order, sorted; all if None."""
        indices = self.split.parts[part]
        if count is None or count >= len(indices):
            return indices
        return np.sort(hash_order(indices, self.seed, "audit", part, *names)[:count])

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """(N,) int64 class labels of samples.

        Raises:
            NotApplicable: The labels are not one class per sample.
        """
        try:
            return data.class_labels(self.source, indices, self.batch_size)
        except DataError as error:
            raise NotApplicable(str(error)) from None

    def forgotten_classes(self) -> np.ndarray:
        """Classes of which nothing is retained, sorted.

        Raises:
            NotApplicable: There are none: the forget set is not whole classes.
        """
        return whole_classes(*(self.labels(self.split.parts[p]) for p in ("forget", "retain")))


def whole_classes(forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """Classes of the forget labels, sorted, of which nothing is retained.

    Raises:
        NotApplicable: There are none, or some are retained in part.
    """
    classes = np.unique(forget)
    if not len(classes) or np.isin(classes, retain).any():
        raise NotApplicable("only where whole classes are forgotten")
    return classes


Tier = Literal["free", "minutes", "shadows"]
TIERS: Mapping[str, str] = {
    "free": "seconds, from the stored scores of a suite",
    "minutes": "forward passes or a short training of every stored model",
    "shadows": "many trainings: see --shadows, which prints their cost first",
}
Parts = Mapping[str, Scores]
PartNames = Annotated[tuple[str, ...], Field(min_length=1)]


def wanted_parts(
    names: Iterable[str], present: Iterable[str], table: Mapping[str, Part] = PARTS
) -> list[str]:
    """The parts of a config that are there; ``test`` stands for all that hold out what is kept.

    Raises:
        NotApplicable: None is there.
    """
    asked, there = list(names), list(present)
    groups = [utility_parts(there, table) if name == "test" else [name] for name in asked]
    parts = list(dict.fromkeys(part for group in groups for part in group if part in there))
    if not parts:
        scored = ", ".join(sorted(there))
        raise NotApplicable(f"nothing is called {', '.join(asked) or '(none)'}; parts: {scored}")
    return parts


def accuracy_heads(present: Iterable[str], table: Mapping[str, Part] = PARTS) -> dict[str, str]:
    """Part -> the head of its accuracy: FA, RA, and TA of all that hold out what is kept."""
    there = list(present)
    tests = {part: part.replace("test", "TA", 1) for part in utility_parts(there, table)}
    heads = {"forget": "FA", "retain": "RA", **tests}
    return {part: head.replace("_", " ") for part, head in heads.items() if part in there}


@dataclass(frozen=True)
class AuditInfo:
    """Facts about an audit that are printed and hashed.

    Attributes:
        version: Raised whenever the same inputs would give other numbers.
        tier: What it costs.
        ideal: The value of a perfect method, in words.
        scenario: ``class`` if it needs whole classes forgotten.
    """

    version: int
    tier: Tier
    unit: str
    ideal: str = "the value of Retrain against a second Retrain"
    scenario: Literal["any", "class"] = "any"

    def inapplicable(self, scenario: str) -> str | None:
        """Why the audit has no meaning under a scenario; an unknown one rules nothing out."""
        if self.scenario == "class" and scenario not in ("", "class"):
            return f"only where whole classes are forgotten, and this scenario is {scenario}"
        return None


class Audit(ABC):
    """Base of all audits; a nested ``Config`` is the only place for defaults.

    Attributes:
        parts: What the parts of the audited benchmark are for.
        budget: ``samples`` and ``steps`` of an attacker -> the setting that each is.
    """

    info: ClassVar[AuditInfo]
    budget: ClassVar[Mapping[str, str]] = {}
    parts: Mapping[str, Part] = PARTS
    Config: ClassVar[type[Strict]] = Strict

    def __init__(self, config: Strict | None = None):
        self.config: Any = config if config is not None else self.Config()

    def shared(self, first: Parts, second: Parts) -> list[str]:
        """The configured parts that both models were scored on.

        Raises:
            NotApplicable: There are none.
        """
        return wanted_parts(self.config.parts, first.keys() & second.keys(), self.parts)


class PairAudit(Audit):
    """Compares what two models say about the same samples."""

    @abstractmethod
    def compare(self, first: Parts, second: Parts, *, seed: int) -> Measures:
        """Measures of ``first`` (the unlearned model) against ``second`` (Retrain).

        Args:
            first: Part -> scores.
            second: Part -> scores of the same samples in the same order.
            seed: Of draws and bootstraps.

        Raises:
            NotApplicable: The audit has no meaning for these scores.
        """


class PopulationAudit(Audit):
    """Compares many unlearned with many retrained models of one split.

    Attributes:
        least: Design of shadows -> models that it takes at least.
    """

    least: ClassVar[Mapping[str, int]] = {"fixed": 2}

    @abstractmethod
    def compare(
        self, unlearned: Sequence[Parts], retrained: Sequence[Parts], *, seed: int
    ) -> Measures:
        """Measures of one population against the other.

        Args:
            unlearned: Part -> scores of each unlearned model.
            retrained: The same of each Retrain; same split, independent training seeds.
            seed: Of draws and bootstraps.
        """


class ModelAudit(Audit):
    """Probes or attacks one stored model; Retrain and a second Retrain get the same treatment.

    Attributes:
        leaks: Last word of the measures that say how much of the forgotten is known, in percent;
            empty where none does.
        referenced: Whether the attacker also has a Retrain that is not the attacked one.
    """

    leaks: ClassVar[str] = "forget"
    referenced: ClassVar[bool] = False

    @abstractmethod
    def measure(self, task: AuditTask) -> Measures:
        """Measures of one model.

        Raises:
            NotApplicable: The audit has no meaning for this model.
        """

    def relate(self, row: Measures, retrain: Measures) -> Measures:
        """Further measures of a row that need Retrain's, such as a ratio; none by default."""
        return {}

    def advantage(self, row: Measures, retrain: Measures) -> float | None:
        """How much more of the forgotten a row shows than Retrain under the same attack, in points.

        Returns:
            The largest difference over the measures that say so; None where none does.
        """
        found = []
        for name, ours in row.items():
            theirs = retrain.get(name)
            if name.split()[-1] != self.leaks or theirs is None:
                continue
            if ours.value is not None and theirs.value is not None:
                found.append(ours.value - theirs.value)
        return max(found, default=None)
