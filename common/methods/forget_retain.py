"""The common body of the methods that put a term on forget data and one on retain data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from common.base.config import Strict
from common.base.numbers import NonNegative, Positive
from common.bounded.config import FilaConfig
from common.methods.gradient import AdaptedConfig, GradientMethod
from common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from common.data.batch import Batch
    from common.objectives.objectives import Objective, Term


ADAPTER_LR = 3e-3


class ForgetConfig(AdaptedConfig):
    """What is trained, plus a forget term.  The defaults suit tiny models trained from scratch.

    Attributes:
        forget_weight: Factor of the forget term.
        average: ``samples``: mean over samples of means over positions (the TOFU paper's);
            ``tokens``: mean over all positions of a batch (what published code does).  It does not
            touch sums of log-probabilities.
        fila: Start the adapters on what forget needs most; reads retain data.
    """

    batch_size: Annotated[int, Field(ge=1)] = 16
    lr: Positive = 1e-4
    forget_weight: NonNegative = 1.0
    average: Literal["samples", "tokens"] = "samples"
    fila: FilaConfig | None = None

    @model_validator(mode="after")
    def _fila_starts_adapters(self) -> ForgetConfig:
        if self.fila is not None and self.adapter is None:
            raise ValueError("fila sets where adapters start; give adapter too")
        for name in ("weight_clip", "ball", "penalty"):
            if self.fila is not None and getattr(self, name):
                raise ValueError(f"{name} takes adapters that start at zero; drop it or fila")
        return self


class RetainConfig(ForgetConfig):
    """A forget term and a retain term.

    Attributes:
        retain_weight: Factor of the retain term.
    """

    retain_weight: NonNegative = 1.0


class RetainTermMethod(GradientMethod):
    """A retain term, and FILA where configured; subclasses say in ``prepare`` what is minimised."""

    Config: ClassVar[type[Strict]] = RetainConfig

    def retain_term(self, task: UnlearnTask) -> Term | None:
        """What is minimised on retain data: cross-entropy unless a subclass says otherwise."""
        from common.objectives.positions import cross_entropy
        from common.objectives.terms import Mean

        return Mean(cross_entropy, self.config.average)

    def initialise(self, task: UnlearnTask) -> None:
        """FILA, where configured."""
        if self.config.fila is not None:
            from common.methods.tools.fila import start_adapters

            start_adapters(task, self.config.fila)


class ForgetRetainMethod(RetainTermMethod):
    """Forget term + retain term -> method; subclasses say what the terms are."""

    @abstractmethod
    def forget_term(self, task: UnlearnTask) -> Term:
        """What is minimised on forget data."""

    def views(self, task: UnlearnTask) -> Mapping[str, Callable[[Batch], Batch]]:
        """Parts whose batches are seen in another way."""
        return {}

    def prepare(self, task: UnlearnTask) -> Objective:
        """Both terms, weighted."""
        from common.objectives.objectives import ForgetRetain

        config: Any = self.config
        return ForgetRetain(
            self.forget_term(task),
            self.retain_term(task),
            config.forget_weight,
            getattr(config, "retain_weight", 1.0),
            self.views(task),
        )


class ForgetOnlyMethod(ForgetRetainMethod):
    """A method that never reads retain data."""

    Config: ClassVar[type[Strict]] = ForgetConfig

    def retain_term(self, task: UnlearnTask) -> Term | None:
        """None."""
        return None
