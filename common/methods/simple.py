"""Methods that know no modality.

Defaults come from small trials on digits (rank 8, alpha 16, omega 100, base rate 3e-3 divided by
the adapter's slope, lambda 0.1, 100 steps); ``paper_literal`` and ``paper_two_rates`` hold the
paper's own settings.  The variants differ in a config only: a new one is a subclass of a few lines
or, in a suite, a row with ``params``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import (
    AdaptedConfig,
    AdaptedMethod,
    GradientConfig,
    GradientMethod,
)
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.data.loader import Loader
    from stable_forgetting.common.objectives.objectives import Objective


BOTH = frozenset({"forget", "retain"})


class Finetune(GradientMethod):
    """FT: keep training on the retain set and hope that the rest is forgotten.

    Formula: minimise CE(B_r).  Source: the SalUn and Unlearn-Sparse repositories.
    """

    info = MethodInfo(
        1, "Golatkar et al. 2020 (as FT in SalUn, arXiv 2310.12508)", frozenset({"retain"})
    )

    class Config(GradientConfig):
        lr: Positive = 1e-3
        lam: NonNegative = 0.0
        epochs_of: str | None = None
        reading: Literal["weighted"] = "weighted"

    def objective(self) -> Objective:
        """Cross-entropy on retain."""
        from stable_forgetting.common.objectives.objectives import CrossEntropy

        return CrossEntropy("retain", self.config.average)


class Ascent(GradientMethod):
    """GA: gradient ascent on the forget set.  Never reads retain data.

    Formula: minimise -CE(B_f), or the saturating -log(1 - p_y) (``unlikelihood``).
    Source: Graves et al. 2021; Thudi et al. 2022.
    """

    info = MethodInfo(1, "Thudi et al. 2022 (arXiv 2109.13398)", frozenset({"forget"}))

    class Config(GradientConfig):
        steps: Count | None = 50
        lr: Positive = 1e-5
        reading: Literal["weighted"] = "weighted"

    def objective(self) -> Objective:
        """Ascent on forget."""
        from stable_forgetting.common.objectives.objectives import ForgetRetain
        from stable_forgetting.common.objectives.terms import pushed_away

        config = self.config
        return ForgetRetain(pushed_away(config.forget_loss, config.average), log_terms=False)


class RandomLabel(AdaptedMethod):
    """RL: train on random labels for the forget set and true labels for the retain set.

    Formula: each epoch y~ ~ U{0..C-1} for D_f; ``mixed``: one shuffled pass over D_f u D_r;
    ``sequential``: a pass over D_f, then one over D_r (what the SalUn repository does on CIFAR-10).
    Source: Golatkar et al. 2020; the SalUn repository (Classification/unlearn/RL.py).
    """

    info = MethodInfo(1, "Golatkar et al. 2020 (arXiv 1911.04933)", BOTH)

    class Config(AdaptedConfig):
        """Settings of RL.

        Attributes:
            mode: One shuffled pass over both sets (``mixed``, the default) or one after the other.
            exclude_true: Never draw the true label; off, as in SalUn's repository.
            redraw: Draw the labels anew every epoch; on, as in SalUn's repository.
        """

        steps: Count | None = None
        epochs: Count | None = 3
        batch_size: Count = 64
        lr: Positive = 3e-4
        mode: Literal["mixed", "sequential"] = "mixed"
        exclude_true: bool = False
        redraw: bool = True

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes on relabelled data."""
        from stable_forgetting.common.objectives.objectives import CrossEntropy

        self._attach(task)
        self._train(task, CrossEntropy("mixed"), {"mixed": self._loader(task)})
        return task.model

    def _classes(self, task: UnlearnTask) -> list[int] | None:
        """What labels are drawn from; None for all classes."""
        return None

    def _loader(self, task: UnlearnTask) -> Loader:
        from stable_forgetting.common.data.loader import ChainedLoader, RelabelledLoader

        config: Any = self.config
        micro = config.micro_batch

        def relabel(*parts: str) -> Loader:
            return RelabelledLoader(
                task.loader(*parts, batch_size=micro),
                task.indices("forget"),
                task.family.num_classes,
                classes=self._classes(task),
                exclude_true=config.exclude_true,
                redraw=config.redraw,
            )

        if config.mode == "mixed":
            return relabel("forget", "retain")
        return ChainedLoader([relabel("forget"), task.loader("retain", batch_size=micro)])
