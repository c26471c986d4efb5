"""What an audit is, what it is given, and the measure with interval that it returns.

Importing this module and the audits' own imports no torch: ``unlearn audit --list`` reads classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.audits.measure import Measures, NotApplicable
from common.audits.task import AuditTask
from common.base.config import Strict
from common.data.parts import PARTS, Part, utility_parts

if TYPE_CHECKING:
    from common.measure.scores import Scores

Tier = Literal["free", "minutes", "shadows"]
TIERS: Mapping[str, str] = {
    "free": "seconds, from the stored scores of a suite",
    "minutes": "forward passes or a short training of every stored model",
    "shadows": "many trainings: see --shadows, which prints their cost first",
}
Parts = Mapping[str, "Scores"]
PartNames = Annotated[tuple[str, ...], Field(min_length=1)]


def wanted_parts(
    names: Iterable[str], present: Iterable[str], table: Mapping[str, Part] = PARTS
) -> list[str]:
    """The parts of a config that are there.

    Args:
        names: As configured; ``test`` stands for all of
            :func:`common.data.parts.utility_parts`.
        present: Parts that were scored.
        table: What they are for.

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


@dataclass(frozen=True)
class AuditInfo:
    """Facts about an audit that are printed and hashed.

    Attributes:
        version: Raised whenever the same inputs would give other numbers.
        tier: What it costs.
        unit: Of its measures.
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
    """

    info: ClassVar[AuditInfo]
    parts: Mapping[str, Part] = PARTS
    Config: ClassVar[type[Strict]] = Strict

    def __init__(self, config: Strict | None = None):
        self.config: Any = config if config is not None else self.Config()


class PairAudit(Audit):
    """Compares what two models say about the same samples."""

    def shared(self, first: Parts, second: Parts) -> list[str]:
        """The configured parts that both models were scored on.

        Raises:
            NotApplicable: There are none.
        """
        return wanted_parts(self.config.parts, first.keys() & second.keys(), self.parts)

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
    """Probes or attacks one stored model; Retrain and a second Retrain get the same treatment."""

    @abstractmethod
    def measure(self, task: AuditTask) -> Measures:
        """Measures of one model.

        Raises:
            NotApplicable: The audit has no meaning for this model.
        """

    def relate(self, row: Measures, retrain: Measures) -> Measures:
        """Further measures of a row that need Retrain's, such as a ratio; none by default."""
        return {}
