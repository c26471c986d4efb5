"""Methods that expect the attacker or bound the damage: SAM, ILU, UAM, PDU, RFE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, RetainConfig
from stable_forgetting.common.methods.gradient import GradientMethod, ShortConfig
from stable_forgetting.common.methods.preference import NPOGdr, PreferenceConfig
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from stable_forgetting.common.train.protocols import AfterStep


class NPOSam(NPOGdr):
    """NPO + SAM: the preference loss at the worst weights close by, so that relearning is slower.

    Formula: minimise w_f NPO(B_f; theta + rho g / ||g||) + w_r CE(B_r; theta), g = grad of NPO(B_f)
    at theta, the norm over all trained parameters; the second gradient is taken with g fixed.
    Source: Fan et al. 2025 (arXiv 2502.05374); OPTML-Group/Unlearn-Smooth (rho 0.01).
    """

    info = MethodInfo(1, "NPO+SAM, Fan et al. 2025 (arXiv 2502.05374)", BOTH)

    class Config(PreferenceConfig, RetainConfig):
        """Settings of NPO + SAM.

        Attributes:
            rho: How far the worst weights lie; .01, as published.
        """

        rho: Positive = 0.01
        compat: Literal["none"] = "none"

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms, the first one at the worst weights."""
        return tools.Sharpness(task.model, self.terms(task), self.config.rho)


class ILU(NPOGdr):
    """ILU: NPO and cross-entropy, with a penalty that makes retain data a fixed point of training.

    Formula: minimise w_f NPO(B_f) + w_r [CE(B_r) + gamma s^2], s = d/dw CE(w z(B_r)) at w = 1 =
    mean sum_v p_v z_v - z_y, the IRM penalty of one environment.  The paper takes fine-tuning data
    for it; here they are the retain set, which is what an attacker without other data has.
    Source: Wang et al. 2025 (arXiv 2506.01339); the penalty, Arjovsky et al. 2019
    (arXiv 1907.02893).
    """

    info = MethodInfo(1, "ILU, Wang et al. 2025 (arXiv 2506.01339)", BOTH, reading=True)

    class Config(PreferenceConfig, RetainConfig):
        """Settings of ILU.

        Attributes:
            gamma: Weight of the penalty; 1 is ours.
        """

        gamma: NonNegative = 1.0
        compat: Literal["none"] = "none"

    def retain_term(self, task: UnlearnTask) -> objectives.Term:
        """Cross-entropy and the penalty."""
        return tools.Invariant(self.config.gamma, self.over)


class UAM(GradientMethod):
    """UAM: fine-tune on retain at the weights where forget is worst.

    Formula: theta' = theta + rho g / ||g||, g = grad CE(B_f); step along grad CE(B_r) at theta'.
    Source: Unlearning-Aware Minimization, NeurIPS 2025; Harry24k/machine-unlearning-pytorch
    (torchunlearn, optim/minimizer.py; there rho follows a cosine, which is left out).
    """

    info = MethodInfo(1, "UAM, Kim et al., NeurIPS 2025", BOTH)

    class Config(ShortConfig):
        """Settings of UAM.

        Attributes:
            rho: Length of the step of ascent; .05, that of sharpness-aware minimisation.
        """

        epochs_of: str | None = "retain"
        rho: Positive = 0.05

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """The retain loss, one step of ascent away."""
        return tools.AscentFirst(task.model, self.config.rho, self.config.average)


class PDU(ForgetRetainMethod):
    """PDU: flatten the logits on forget, as far as the retain loss stays below a level.

    Formula: minimise w_f mean (max_v z_v - mean_v z_v)^2 on B_f + lambda (CE(B_r) - level); after
    each step lambda <- max(0, lambda + rate (CE(B_r) - level)), from lambda = w_r.  The published
    code averages the first term over the answers' own positions, one later than those that predict
    them, which are taken here; it leaves lambda as it is for five epochs, here for none; its script
    for TOFU has w_r 100, rate 5 and level .3.
    Source: Entesari et al. 2025 (arXiv 2506.05314); open-unlearning (trainer/unlearn/pdu.py).
    """

    info = MethodInfo(2, "PDU, Entesari et al. 2025 (arXiv 2506.05314)", BOTH)

    class Config(RetainConfig):
        """Settings of PDU.

        Attributes:
            level: Loss on retain data that is tolerated, in nats; .1 is ours, for small models.
            dual_rate: What a step adds to lambda for each nat too much; 1, open-unlearning's.
        """

        average: Literal["samples", "tokens"] = "tokens"
        level: NonNegative = 0.1
        dual_rate: NonNegative = 1.0

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """The spread of the logits."""
        return objectives.Mean(tools.logit_spread, self.over)

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms, and their multiplier."""
        config: Any = self.config
        self._dual = tools.Multiplier(config.retain_weight, config.dual_rate)
        return tools.PrimalDual(self.terms(task), config.level, self._dual)

    def _constraints(self, *after_step: AfterStep) -> dict[str, Any]:
        hooks = super()._constraints(*after_step, self._dual)
        return {**hooks, "stateful": {"dual": self._dual}}


class RFE(GradientMethod):
    """RFE: bounded ascent, then ascent that retain data do not feel at first order.

    Formula: steps 1 to ``first``: minimise -CE(B_f) + lambda v + rho/2 max(v, 0)^2, v = CE(B_r) -
    CE_0 - slack, CE_0 that of the first batch, lambda <- max(0, lambda + rate v); later the
    gradient u of this is replaced by u - min(0, <u, k>) k / ||k||^2, k = grad [CE(B_r) + drift
    ||p(B_r) - p_O(B_r)||^2].  The paper projects on retained samples that resemble the forgotten
    ones; here on the retain set, and the distance stands for its Wasserstein-2 term.
    Source: Cheng et al. 2026 (arXiv 2603.26569); Harry24k/machine-unlearning-pytorch (rfe.py).
    """

    info = MethodInfo(2, "RFE, Cheng et al. 2026 (arXiv 2603.26569)", BOTH, reading=True)

    class Config(ShortConfig):
        """Settings of RFE.

        Attributes:
            first: Steps before the gradient is projected; 100, torchunlearn's.
            slack: How far the retain loss may rise, in nats; .05, torchunlearn's.
            rho: Weight of the squared violation; 1, torchunlearn's.
            dual: lambda at the start; 1, torchunlearn's.
            dual_rate: What a step adds to lambda for each nat too much; .05, torchunlearn's.
            drift: Weight of the distance from Original's softmax; 1, torchunlearn's.
        """

        epochs_of: str | None = "retain"
        first: Annotated[int, Field(ge=0)] = 100
        slack: NonNegative = 0.05
        rho: NonNegative = 1.0
        dual: NonNegative = 1.0
        dual_rate: NonNegative = 0.05
        drift: NonNegative = 1.0

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """The two phases."""
        config: Any = self.config
        self._phases = tools.Entangled(
            task.model,
            config.slack,
            config.rho,
            tools.Multiplier(config.dual, config.dual_rate),
            config.first,
            task.reference(),
            config.drift,
        )
        return self._phases

    def _constraints(self, *after_step: AfterStep) -> dict[str, Any]:
        hooks = super()._constraints(*after_step, self._phases.after_step)
        return {**hooks, "stateful": {"phases": self._phases}}
