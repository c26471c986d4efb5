"""DUCK: moves the features of forget images to the centres of other classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.gradient import GradientMethod, ShortConfig
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import nn


class DUCK(GradientMethod):
    """DUCK: features of forget images go to the nearest centre of another class; CE on retain.

    Formula: minimise w_f mean over B_f of (1 - cos(h(x), m_c(x))) + w_r CE(z(B_r) / temperature), h
    the input of the head, m_c the mean of Original's h over retain images of class c, and c(x) the
    class without y whose m_c has the largest cosine with Original's h(x).  The code finds c(x) when
    it first meets x in training and takes the first 50 batches for m_c; here both are Original's,
    on all data.  It pairs each forget batch with some retain batches, and stops when forget
    accuracy reaches a target; here every step has one of each, and nothing stops it.  The code's
    second phase is left out: 2 epochs at lr 1e-4 with lambda_1 / 10, on augmented retain batches of
    512.
    Source: Cotogni et al. 2023 (arXiv 2312.02052); OcraM17/DUCK (src/Unlearning_methods.py).
    """

    info = MethodInfo(1, "DUCK, Cotogni et al. 2023 (arXiv 2312.02052)", BOTH, modality="vision")

    class Config(ShortConfig):
        """Settings of DUCK.

        Attributes:
            forget_weight: Factor of the cosine distance; 1, the code's lambda_1.
            retain_weight: Factor of the retain term; 1.4, the code's lambda_2.
            temperature: Divides the retain logits; 2, the code's.
        """

        epochs_of: str | None = "retain"
        forget_weight: NonNegative = 1.0
        retain_weight: NonNegative = 1.4
        temperature: Positive = 2.0

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """The centres, and where each forget image goes."""
        from stable_forgetting.vision.methods.centres import Centres

        config: Any = self.config
        weights = config.forget_weight, config.retain_weight
        return Centres.of(task, self._features, *weights, config.temperature)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Watches the input of the head while it trains."""
        from stable_forgetting.vision.methods.contrast import HeadInputs

        self._features = HeadInputs()
        with self._features.watching(task.model, task.family.head):
            return super().unlearn(task)
