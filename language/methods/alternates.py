"""Methods with another answer beside the true one: LLMU, KTO, AltPO, SimDPO, JensUn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, RetainConfig
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.language.methods.refusals import DPOGdr, mismatching, refusing

if TYPE_CHECKING:
    from stable_forgetting.common.data.access import GuardedSource
    from stable_forgetting.language.methods.preference import RefusalPreference


class LLMU(ForgetRetainMethod):
    """LLMU: ascend on the true answers, learn answers to other questions, and stay near Original.

    Formula: minimise -w_f CE(B_f) + w_m CE(y' | B_f) + w_r KL(p_O || p_theta)(B_r), p_O Original's,
    y' the answer of a random retain sample, drawn once per run.  The published code draws five
    other answers at each step, from TruthfulQA, and takes the divergence over every position,
    padding too, without the entropy of p_O, which is constant.
    Source: Yao et al. 2023 (arXiv 2310.10683); kevinyaobytedance/llm_unlearn (unlearn_harm.py).
    """

    info = MethodInfo(1, "LLMU, Yao et al. 2023 (arXiv 2310.10683)", BOTH, modality="language")

    class Config(RetainConfig):
        """Settings of LLMU.

        Attributes:
            forget_weight: Factor of the ascent; .5, as published.
            mismatch_weight: Factor of the cross-entropy on other answers; 1, as published.
            retain_weight: Factor of the divergence from Original; 1, as published.
        """

        forget_weight: NonNegative = 0.5
        mismatch_weight: NonNegative = 1.0

    def retain_term(self, task: UnlearnTask) -> objectives.Term:
        """KL to Original."""
        return objectives.divergence_from(task.reference(), self.over)

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """All three terms."""
        from stable_forgetting.language.methods.preference import AscentAndMismatch

        config: Any = self.config
        return AscentAndMismatch(
            refusals=mismatching(task, "llmu", "mismatch"),
            over=self.over,
            ascent_weight=config.forget_weight,
            mismatch_weight=config.mismatch_weight,
            retain=self.retain_term(task),
            retain_weight=config.retain_weight,
        )


class KTO(DPOGdr):
    """KTO: make true answers less likely against how far refusals have moved; descend on retain.

    Formula: minimise -(2/beta) mean log sigmoid(k - beta log r(y)) on B_f + w_r CE(B_r), log r =
    log p_theta - log p_ref, summed over the answer, k = mean over B_f of log r(y_idk) without
    gradient, which estimates a divergence.  It is that code's, in which beta does not scale k, and
    k may be negative; its constant 1 is left out.
    Source: Ethayarajh et al. 2024 (arXiv 2402.01306), as in NPO, Zhang et al. 2024
    (arXiv 2404.05868); licong-lin/negative-preference-optimization ("kto_logsigmoid_grad_diff").
    """

    info = MethodInfo(
        1,
        "KTO, Ethayarajh et al. 2024 (arXiv 2402.01306), as in NPO (arXiv 2404.05868)",
        BOTH,
        modality="language",
    )

    class Config(DPOGdr.Config):
        """Settings of KTO: those of DPO + GDR."""

        compat: Literal["none"] = "none"

    def pairs(self) -> type[RefusalPreference]:
        """The true answer against the refusals' mean."""
        from stable_forgetting.language.methods.preference import AgainstMean

        return AgainstMean


class AltPO(DPOGdr):
    """AltPO: prefer another plausible answer to the true one, and descend on retain.

    Formula: minimise -(2/beta) mean log sigmoid(beta [log r(y') - log r(y)]) on B_f + w_r CE(B_r),
    log r = log p_theta - log p_ref, y' an answer in the form of the true one.  The source lets the
    model write y'; here it is the answer of a random retain sample, drawn once per run.
    Source: Mekala et al. 2025 (arXiv 2409.13474); open-unlearning (community/methods/AltPO).
    """

    info = MethodInfo(
        1, "AltPO, Mekala et al. 2025 (arXiv 2409.13474)", BOTH, modality="language", reading=True
    )

    def preferred(self, task: UnlearnTask) -> GuardedSource:
        """Forget questions with answers of retain samples."""
        return mismatching(task, "altpo", "alternates")


class SimDPO(ForgetRetainMethod):
    """SimDPO: prefer a refusal by mean log-probabilities, without a reference; descend on retain.

    Formula: minimise -(2/beta) mean log sigmoid(beta [log p(y_idk)/|y_idk| - log p(y)/|y|] - gamma)
    on B_f + w_r CE(B_r): what SimNPO is to NPO.
    Source: SimPO, Meng et al. 2024 (arXiv 2405.14734), on the pairs of DPO in TOFU.
    """

    info = MethodInfo(
        1, "SimPO, Meng et al. 2024 (arXiv 2405.14734)", BOTH, modality="language", reading=True
    )

    class Config(RetainConfig):
        """Settings of SimDPO.

        Attributes:
            beta: How soon a preference counts as learnt, per nat and token; 2.5, as in SimPO.
            gamma: The margin that a preference should have; .5 is in SimPO's range.
        """

        beta: Positive = 2.5
        gamma: float = 0.5

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """The preference on means, and the retain term."""
        from stable_forgetting.language.methods.preference import MeanPreference

        config: Any = self.config
        return MeanPreference(
            refusals=refusing(task),
            beta=config.beta,
            gamma=config.gamma,
            forget_weight=config.forget_weight,
            retain=self.retain_term(task),
            retain_weight=config.retain_weight,
        )


class JensUn(ForgetRetainMethod):
    """JensUn: Jensen-Shannon divergences, to a refusal's tokens on forget, to Original on retain.

    Formula: minimise w_f mean JS(p_theta || one-hot of t) on B_f + w_r mean JS(p_theta || p_O) on
    B_r; t are the tokens of a refusal over the positions of the true answer, from the start again
    where it is shorter.  Both terms are at most log 2.
    Source: Singh et al. 2025 (arXiv 2509.02820); implemented from its formula.
    """

    info = MethodInfo(1, "JensUn, Singh et al. 2025 (arXiv 2509.02820)", BOTH, modality="language")

    class Config(RetainConfig):
        average: Literal["samples", "tokens"] = "tokens"

    def retain_term(self, task: UnlearnTask) -> objectives.Term:
        """The divergence from Original."""
        from stable_forgetting.language.methods.preference import JensenShannon

        return JensenShannon(task.reference(), self.over)

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both divergences."""
        from stable_forgetting.language.methods.preference import RefusalTokens

        config: Any = self.config
        return RefusalTokens(
            refusals=refusing(task),
            over=self.over,
            forget_weight=config.forget_weight,
            retain=self.retain_term(task),
            retain_weight=config.retain_weight,
        )
