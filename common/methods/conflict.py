"""Methods that weigh the forget gradient against the retain gradient by a rule.

MUNBa, NGDiff, GRU, GDR-GMA, OrthoGrad.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, RetainConfig
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from stable_forgetting.common.train.protocols import AfterStep


class ByRule(ForgetRetainMethod):
    """A forget and a retain term, whose gradients go through :meth:`rule` before they are added.

    With ``accumulation`` the rule is that of each micro-batch.
    """

    @abstractmethod
    def rule(self, task: UnlearnTask) -> Callable[..., Any]:
        """What is made of the two gradients; one with a state is kept in checkpoints."""

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms and the rule."""
        terms, self._rule = self.terms(task), self.rule(task)
        return tools.ByRule(task.model, terms, self._rule)

    def _constraints(self, *after_step: AfterStep) -> dict[str, Any]:
        states = {"rule": self._rule} if hasattr(self._rule, "state") else {}
        return {**super()._constraints(*after_step), "stateful": states}


class MUNBa(ByRule):
    """MUNBa: what forget and retain agree on in Nash bargaining over one step.

    Formula: u = grad CE(B_f, random labels), k = grad CE(B_r); the step d = a_f u + a_r k with
    <u, d> = 1 / a_f, <k, d> = 1 / a_r, so d = (u / ||u|| + k / ||k||) / sqrt(1 + cos(u, k)), whose
    length is sqrt(2); here w_f and w_r weigh the two (1 in the source).  Ascent in the place of the
    random labels would make it ``ngdiff`` at that length.  Where the solution of the published code
    is not positive, it takes u / 10 + k; in the form above it always is.  In each epoch that code
    goes on with steps on retain data alone where the forget data are used up; here every step has
    both.
    Source: Wu & Harandi 2024 (arXiv 2411.15537, ICCV 2025); JingWu321/MUNBa
    (Classification/unlearn/MUNBa.py: new random labels in each step, gradient norm clipped at 1).
    """

    info = MethodInfo(1, "MUNBa, Wu & Harandi 2024 (arXiv 2411.15537)", BOTH)

    class Config(RetainConfig):
        """Settings of MUNBa.

        Attributes:
            max_grad_norm: Largest length of a step's gradient; 1, as published.
        """

        max_grad_norm: Positive | None = 1.0

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """Towards random labels."""
        return objectives.Mean(tools.to_random_labels, self.over)

    def rule(self, task: UnlearnTask) -> Callable[..., Any]:
        """The bargain."""
        return tools.bargained


class NGDiff(ByRule):
    """NGDiff: gradient difference of two gradients at length one.

    Formula: step along w_r k / ||k|| - w_f g / ||g||, g = grad CE(B_f), k = grad CE(B_r), the norms
    over all trained parameters (both weights 1 in the source).  Its automatic learning rate (GeN)
    is left out.
    Source: Bu et al. 2024 (arXiv 2410.22086, NAACL 2025); the formula of the paper.
    """

    info = MethodInfo(1, "NGDiff, Bu et al. 2024 (arXiv 2410.22086)", BOTH)

    def rule(self, task: UnlearnTask) -> Callable[..., Any]:
        """Both at length one."""
        return tools.normalised


class GRU(ByRule):
    """GRU: ascent without what opposes the retain gradient.

    Formula: u = -grad CE(B_f), k = grad CE(B_r); m <- gamma k + (1 - gamma) m from m = 0; step
    along w_f (u - min(0, <u, m>) m / ||m||^2) + w_r k.  Published, w_r is 0: retain data only
    rectify.  The paper rectifies NPO, WGA and other losses as well.
    Source: Wang et al. 2025 (arXiv 2503.09117, ICML); tmlr-group/GRU
    (dataloader_faster_refactor1.py, ``ga_gru``).
    """

    info = MethodInfo(1, "GRU, Wang et al. 2025 (arXiv 2503.09117)", BOTH)

    class Config(RetainConfig):
        """Settings of GRU.

        Attributes:
            retain_weight: Factor of the retain gradient; 0, as published.
            gamma: Share of the new retain gradient in the moving average; .8, as published.
        """

        average: Literal["samples", "tokens"] = "tokens"
        retain_weight: NonNegative = 0.0
        gamma: Annotated[float, Field(gt=0, le=1)] = 0.8

    def rule(self, task: UnlearnTask) -> Callable[..., Any]:
        """The projection, with its moving average."""
        return tools.Smoothed(self.config.gamma)


class GDRGMA(ByRule):
    """GDR-GMA: ascent and descent each off the other, ascent only where the retain loss is low.

    Formula: u = -grad CE(B_f), k = grad CE(B_r); in each tensor u' = u - min(0, <u, k>) k / ||k||^2
    and k' = k - min(0, <u, k>) u / ||u||^2; from the second pass over D_f on, the last tensor's u'
    likewise comes off the mean of those u of the last pass that oppose it; step along w_f a u' +
    w_r (1 - a) k', a = sigmoid(gamma (level - CE(B_r))) (both weights 1 in the source).  As in the
    paper, both are projected as they were; the published code takes u off the projected k.
    Source: Lin et al. 2024 (ACM MM, doi 10.1145/3664647.3680775); RUIYUN-ML/GDR-GMA (unlearn.py,
    memory_bank.py).
    """

    info = MethodInfo(1, "GDR-GMA, Lin et al. 2024 (ACM MM)", BOTH)

    class Config(RetainConfig):
        """Settings of GDR-GMA.

        Attributes:
            gamma: How sharply the weight turns at the level; 100, as published.
            level: Loss on retain data at which both weigh the same, in nats; .02, as published.
        """

        gamma: NonNegative = 100.0
        level: NonNegative = 0.02

    def rule(self, task: UnlearnTask) -> Callable[..., Any]:
        """Projections and weights; remembers as many gradients as a pass over D_f has batches."""
        size = math.ceil(len(task.indices("forget")) / self.config.engine().micro_batch)
        return tools.Adjusted(size, self.config.gamma, self.config.level)


class OrthoGrad(ForgetRetainMethod):
    """OrthoGrad: ascent orthogonal to the gradient of every retained sample of the batch.

    Formula: g = grad CE(B_f), k_i = grad CE of sample i of B_r; in each tensor g' = g - Q Q^T g, Q
    an orthonormal basis of the span of all k_i; step along w_r mean_i k_i - w_f g', the weights
    alpha and 1 - alpha in the source.  The source may put Adam's directions in the place of the
    gradients.  A tensor of no more entries than B_r has samples usually gets no ascent.  Memory: a
    gradient per retained sample.
    Source: Shamsian et al. 2025 (arXiv 2503.02312); a public copy of its code.
    """

    info = MethodInfo(1, "OrthoGrad, Shamsian et al. 2025 (arXiv 2503.02312)", BOTH)

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Ascent and descent, the first one projected."""
        return tools.Orthogonal(task.model, self.terms(task))
