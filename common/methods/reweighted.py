"""Forget terms that reweight or replace each position's target: UNDIAL, WGA, SatImp, CE-U."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common.base.numbers import Amount, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.forget_retain import (
    ForgetConfig,
    ForgetRetainMethod,
    RetainConfig,
)
from stable_forgetting.common.methods.simple import BOTH
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from stable_forgetting.common.data.batch import Batch
    from stable_forgetting.common.objectives.positions import Average
    from stable_forgetting.common.objectives.terms import Term


class Undial(ForgetRetainMethod):
    """UNDIAL: learn Original's distribution with the label's logit lowered.

    Formula: minimise mean CE(softmax(z_ref - strength e_y), p_theta) on B_f; no retain data.
    ``compat: openunlearning`` averages over every position, the question's and the padding's too
    (to the longest text of the batch), as that code does; where a position has no label, the logit
    of the hundredth entry from the vocabulary's end is lowered.
    Source: arXiv 2402.10052; open-unlearning (strength 10, retain weight 0).
    """

    info = MethodInfo(1, "UNDIAL, Dong et al. 2024 (arXiv 2402.10052)", frozenset({"forget"}))

    class Config(ForgetConfig):
        """Settings of UNDIAL.

        Attributes:
            strength: What is taken off the label's logit; 10, open-unlearning's.
            compat: ``openunlearning``: as its code computes it.
        """

        later: ClassVar[Mapping[str, Any]] = {**ForgetConfig.later, "compat": "none"}
        average: Literal["samples", "tokens"] = "tokens"
        strength: Positive = 10.0
        compat: Literal["none", "openunlearning"] = "none"

    def forget_term(self, task: UnlearnTask) -> Term:
        """Self-distillation."""
        from stable_forgetting.common.objectives.terms import SelfDistillation

        config, masked = self.config, self.config.compat == "none"
        over: Average = config.average if masked else "tokens"
        return SelfDistillation(task.reference(), config.strength, over, masked)

    def views(self, task: UnlearnTask) -> Mapping[str, Callable[[Batch], Batch]]:
        """Every position of forget texts, with ``compat``; those without a label are marked."""
        from stable_forgetting.common.data.batch import every_position, predicting, with_labels_of

        if self.config.compat == "none":
            return {}
        every = every_position(task.source, "batch")
        return {"forget": lambda batch: predicting(with_labels_of(every(batch), batch))}


class WGA(ForgetRetainMethod):
    """WGA: ascent weighted by the confidence in the label, so that it fades when forgotten.

    Formula: minimise -mean p^beta CE on B_f (p without gradient) + CE(B_r).
    Source: arXiv 2502.19301; open-unlearning (beta 1).
    """

    info = MethodInfo(1, "WGA, Wang et al. 2025 (arXiv 2502.19301)", BOTH)

    class Config(RetainConfig):
        """Settings of WGA.

        Attributes:
            beta: Power of the label's probability in the weight; 1, open-unlearning's.
        """

        average: Literal["samples", "tokens"] = "tokens"
        beta: NonNegative = 1.0

    def forget_term(self, task: UnlearnTask) -> Term:
        """Weighted ascent."""
        from stable_forgetting.common.objectives.terms import WeightedAscent

        return WeightedAscent(self.config.beta, 0.0, self.config.average)


class SatImp(ForgetRetainMethod):
    """SatImp: ascent weighted by saturation and importance.

    Formula: minimise w_f * -mean p^beta1 (1 - p)^beta2 CE on B_f (p without gradient) + CE(B_r).
    Source: arXiv 2505.11953; open-unlearning (beta1 5, beta2 1, w_f 0.1).
    """

    info = MethodInfo(1, "SatImp, Yang et al. 2025 (arXiv 2505.11953)", BOTH)

    class Config(RetainConfig):
        """Settings of SatImp.

        Attributes:
            beta1: Power of the label's probability in the weight; 5, open-unlearning's.
            beta2: Power of its complement in the weight; 1, open-unlearning's.
        """

        average: Literal["samples", "tokens"] = "tokens"
        forget_weight: NonNegative = 0.1
        beta1: NonNegative = 5.0
        beta2: NonNegative = 1.0

    def forget_term(self, task: UnlearnTask) -> Term:
        """Weighted ascent."""
        from stable_forgetting.common.objectives.terms import WeightedAscent

        return WeightedAscent(self.config.beta1, self.config.beta2, self.config.average)


class CEU(ForgetRetainMethod):
    """CE-U: learn the model's own distribution without the label; no retain data.

    Formula: minimise mean CE(softmax(z with z_y = -inf, no gradient), p_theta) on B_f.
    ``skip_first: 1`` leaves out the first answer position, as the published code does.
    Source: arXiv 2503.01224; open-unlearning.
    """

    info = MethodInfo(1, "CE-U, Yang 2025 (arXiv 2503.01224)", frozenset({"forget"}))

    class Config(ForgetConfig):
        """Settings of CE-U.

        Attributes:
            skip_first: Answer positions that are left out at the beginning; 0, as in the formula.
        """

        average: Literal["samples", "tokens"] = "tokens"
        skip_first: Amount = 0

    def forget_term(self, task: UnlearnTask) -> Term:
        """Towards the other answers."""
        from stable_forgetting.common.objectives.terms import WithoutTheLabel

        return WithoutTheLabel(self.config.skip_first, self.config.average)
