"""Original and Retrain, and the methods that are one plain objective.

Defaults come from small trials on digits (rank 8, alpha 16, omega 100, base rate 3e-3 divided by
the adapter's slope, lambda 0.1, 100 steps); ``paper_literal`` and ``paper_two_rates`` hold the
paper's own settings.  The variants differ in a config only: a new one is a subclass of a few lines
or, in a suite, a row with ``params``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import (
    BOTH,
    FORGET,
    RETAIN,
    MethodInfo,
    UnlearningMethod,
    train_reference,
)
from stable_forgetting.common.methods.gradient import (
    PAPER_LITERAL,
    GradientConfig,
    GradientMethod,
    ShortConfig,
)
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import nn


class Original(UnlearningMethod):
    """The model before unlearning: what doing nothing scores.

    Formula: theta stays what minimising CE over D_f u D_r has made of it.
    """

    info = MethodInfo(1, "-", frozenset(), changes_model=False)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Returns the model as it is."""
        return task.model


class Retrain(UnlearningMethod):
    """The target: trained on the retain set alone, with Original's recipe and from another start.

    Formula: minimise CE(B_r) from a fresh start.
    Source: exact unlearning as defined by Bourtoule et al. 2021, arXiv 1912.03817.

    No Retrain shares its start with Original or with another Retrain, so that none is nearer to a
    model that comes of Original than the others are.
    """

    info = MethodInfo(2, "exact unlearning", RETAIN | {"initial"})

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains a fresh model."""
        return train_reference(task, ["retain"])


class Finetune(GradientMethod):
    """FT: keep training on the retain set and hope that the rest is forgotten.

    Formula: minimise CE(B_r).  Source: the SalUn and Unlearn-Sparse repositories.
    """

    info = MethodInfo(1, "Golatkar et al. 2020 (as FT in SalUn, arXiv 2310.12508)", RETAIN)
    unread = frozenset({"forget_weight", "retain_weight", "forget_loss"})

    class Config(GradientConfig):
        lr: Positive = 1e-3
        forget_weight: NonNegative = 0.0
        epochs_of: str | None = None

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Cross-entropy on retain."""
        return objectives.CrossEntropy("retain", self.config.average)


class Ascent(GradientMethod):
    """GA: gradient ascent on the forget set.  Never reads retain data.

    Formula: minimise -CE(B_f), or the saturating -log(1 - p_y) (``unlikelihood``).
    Source: Graves et al. 2021; Thudi et al. 2022.
    """

    info = MethodInfo(1, "Thudi et al. 2022 (arXiv 2109.13398)", FORGET)
    unread = frozenset({"forget_weight", "retain_weight"})

    class Config(GradientConfig):
        steps: Count | None = 50
        lr: Positive = 1e-5

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Ascent on forget."""
        config = self.config
        return objectives.ForgetRetain(
            objectives.pushed_away(config.forget_loss, config.average), log_terms=False
        )


class GradientDifference(GradientMethod):
    """GD: descend on retain and ascend on forget, all parameters trained.

    Formula: minimise CE(B_r) - lambda CE(B_f); B_r and B_f share one forward.
    Source: Liu et al. 2022; the paper's eq. "gradient difference".
    """

    info = MethodInfo(1, "Liu et al. 2022 (arXiv 2203.12817); the paper, eq. 2", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_LITERAL

    class Config(GradientConfig):
        lr: Positive = 1e-4

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms, weighted."""
        config = self.config
        return objectives.gradient_difference(
            config.retain_weight, config.forget_weight, config.forget_loss, config.average
        )


class NegGradPlus(GradientMethod):
    """NegGrad+: descend on retain and ascend on forget with weights that add up to one.

    Formula: minimise a CE(B_r) - (1 - a) CE(B_f); an epoch is a pass over D_r, D_f is cycled.
    It is gradient difference with lambda = (1 - a) / a and a rate scaled by a.

    Source: Kurmanji et al. 2023, arXiv 2302.09880; the SCRUB and RUM repositories.  Sweep ``a`` in
    0.9 to 0.999.
    """

    info = MethodInfo(1, "Kurmanji et al. 2023 (arXiv 2302.09880)", BOTH)

    class Config(ShortConfig):
        """Settings of NegGrad+.

        Attributes:
            a: Weight of the retain loss, 1 - a that of the forget loss; .95 is inside the published
                sweep.
        """

        a: Annotated[float, Field(gt=0, lt=1)] = 0.95

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms, in one forward."""
        return objectives.gradient_difference(self.config.a, 1 - self.config.a)
