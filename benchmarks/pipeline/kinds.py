"""Stage kinds: what a stage may be.  One class and one registration each; torch-free.

Whatever plans, schedules, prices or shows stages asks the kind; no other module names one by hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from stable_forgetting.benchmarks.pipeline.stage import StageSpec
from stable_forgetting.common.base.registry import Registry

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.context import StageContext

S = TypeVar("S", bound=StageSpec)


class StageKind(ABC, Generic[S]):
    """One kind of stage.  Its module imports torch inside functions only.

    Attributes:
        version: Raised when the same inputs would give other results; part of the identity where
            no benchmark, method or audit has a version for it.
        order: Place in the schedule: of the stages that are ready, lower ones go first.
        trains: Whether it trains a model.  All launched processes do such a stage together; any
            other is done by the first process alone.
        facts: What a complete stage says of itself in ``done.json`` and its children read.
    """

    Spec: ClassVar[type[StageSpec]]
    version: ClassVar[int] = 1
    order: ClassVar[int]
    trains: ClassVar[bool] = False
    events: ClassVar[bool] = False
    facts: ClassVar[tuple[str, ...]] = ("status",)

    @abstractmethod
    def work(self, context: StageContext, spec: S) -> None:
        """Does the stage: reads through ``context`` and writes in ``context.writing()``."""


_HERE = "stable_forgetting.benchmarks"
KINDS: Registry[Any] = Registry("stage kind", f"{_HERE}.pipeline.kinds:StageKind")

for _name, _target, _summary in (
    ("split", "pipeline.measuring:Split", "Freezes the index sets of a seed."),
    ("pretrain", "pipeline.training:Pretrain", "Trains the start of all models."),
    ("original", "pipeline.training:Original", "Trains on everything."),
    ("retrain", "pipeline.training:Retrain", "Trains on the retain set alone."),
    ("unlearn", "pipeline.unlearning:Unlearn", "Runs a method on a trained model."),
    ("score", "pipeline.measuring:Score", "Scores a model in one pass."),
    ("measure", "pipeline.measuring:Measure", "Metrics of stored scores."),
    ("probe", "pipeline.measuring:ProbeModel", "Runs one probe on a stored model."),
    ("audit", "audits.work:AuditProbe", "Runs one audit on a stored model."),
    ("map", "pipeline.sweeping:GridBlock", "Runs some configs of a grid."),
):
    KINDS.register(_name, f"{_HERE}.{_target}", summary=_summary)
