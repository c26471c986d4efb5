"""Negative preference optimisation: NPO, its retain terms, SimNPO, TNPO and WTNPO; and KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from stable_forgetting.common import objectives
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, FORGET, MethodInfo
from stable_forgetting.common.methods.forget_retain import (
    ForgetConfig,
    ForgetRetainMethod,
    PaddedConfig,
    RetainConfig,
)
from stable_forgetting.common.methods.task import UnlearnTask

PAPER = "NPO, Zhang et al. 2024 (arXiv 2404.05868)"


class PreferenceConfig(Strict):
    """What the preference losses have in common.

    Attributes:
        beta: How soon the weight of a forgotten answer fades, per nat; .1, as published.
        compat: Whose code is followed where it differs from the formula; by default nobody's.
    """

    beta: Positive = 0.1
    compat: str = "none"


class NPO(ForgetRetainMethod):
    """NPO: make forget answers less likely than under Original, with a weight that fades.

    Formula: minimise -(2/beta) mean log sigmoid(-beta log(p_theta(y|x) / p_ref(y|x))), log p
    summed over the answer; tends to ascent as beta -> 0.
    ``compat: muse_bench``: the same function of every logit's difference, averaged over all
    positions (padding too) and the vocabulary.  Never reads retain data.  Where images are
    augmented p_ref is that of the plain image.
    Source: arXiv 2404.05868; open-unlearning (its default adds CE on retain: see ``npo_gdr``).
    """

    info = MethodInfo(1, PAPER, FORGET)
    unmasked = {"muse_bench": ("forget",)}

    class Config(PreferenceConfig, ForgetConfig):
        lr: Positive = 3e-5
        compat: Literal["none", "muse_bench"] = "none"

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """The preference loss on log-probabilities of labels, or muse_bench's on logits."""
        config: Any = self.config
        if config.compat == "muse_bench":
            return objectives.logit_preference(task.reference(), config.beta)
        table = tools.reference_likelihoods(task, task.indices("forget"), config)
        return objectives.preference_against(table, config.beta)


class NPOGdr(NPO):
    """NPO + GDR: the preference loss on forget and cross-entropy on retain.

    Formula: minimise w_f NPO(B_f) + w_r CE(B_r); open-unlearning's "NPO".  ``compat: muse_bench``:
    the forget term on logits; that code averages cross-entropy over tokens (``average: tokens``).
    Source: arXiv 2404.05868 (NPO+RT); arXiv 2407.06460 (NPO_GDR).
    """

    info = MethodInfo(1, PAPER + "; MUSE (arXiv 2407.06460)", BOTH)

    class Config(PreferenceConfig, RetainConfig):
        compat: Literal["none", "muse_bench"] = "none"


class NPOKlr(NPO):
    """NPO + KLR: the preference loss on forget and Original's distribution on retain.

    Formula: minimise w_f NPO(B_f) + w_r KL(p_ref || p_theta)(B_r).  ``compat: openunlearning``
    averages the divergence over all positions, padding too; ``compat: muse_bench`` takes both
    terms on raw logits of all positions (its second term is no divergence, is unbounded below, and
    may end a run as diverged where logits are large).
    Source: arXiv 2404.05868 (NPO+KL); arXiv 2407.06460 (NPO_KLR); swj0419/muse_bench.
    """

    info = MethodInfo(1, PAPER + "; MUSE (arXiv 2407.06460)", BOTH)
    unmasked = {"openunlearning": ("retain",), "muse_bench": ("forget", "retain")}

    class Config(PreferenceConfig, PaddedConfig):
        padding = {"openunlearning": "batch"}
        compat: Literal["none", "openunlearning", "muse_bench"] = "none"

    def retain_term(self, task: UnlearnTask) -> objectives.Term:
        """KL to Original, or what muse_bench calls so."""
        if self.config.compat == "muse_bench":
            return objectives.raw_divergence_from(task.reference())
        return objectives.divergence_from(task.reference(), self.over)


class SimNPO(ForgetRetainMethod):
    """SimNPO: the preference loss without a reference, on length-normalised log-probabilities.

    Formula: minimise w_f * -(2/beta) mean log sigmoid(beta (NLL(y|x) / |y| - delta)) + w_r CE(B_r);
    the paper's margin gamma is beta delta.  ``compat: unlearn_simple`` is what that repository runs
    on MUSE: -(2/beta) mean log sigmoid(-beta (z + delta)) of every logit z at all positions.
    Source: arXiv 2410.07163; open-unlearning's defaults (beta 4.5, delta 0, w_f 0.125);
    OPTML-Group/Unlearn-Simple.
    """

    info = MethodInfo(1, "SimNPO, Fan et al. 2024 (arXiv 2410.07163)", BOTH)
    unmasked = {"unlearn_simple": ("forget",)}

    class Config(RetainConfig):
        """Settings of SimNPO.

        Attributes:
            beta: How soon the weight of a forgotten answer fades, per nat and token; 4.5,
                open-unlearning's.
            delta: Loss in nats per token from which an answer counts as forgotten; 0,
                open-unlearning's.
            compat: Whose code is followed where it differs from the formula; by default nobody's.
        """

        forget_weight: float = 0.125
        later: ClassVar[Mapping[str, Any]] = {**RetainConfig.later, "compat": None}
        beta: Positive = 4.5
        delta: float = 0.0
        compat: Literal["unlearn_simple"] | None = None

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """The preference loss on means, or on single logits."""
        config = self.config
        if config.compat is not None:
            return objectives.logit_preference(None, config.beta, config.delta)
        return objectives.simple_preference(config.beta, config.delta)


class TNPO(ForgetRetainMethod):
    """TNPO: the preference loss of every token by itself, and Original's distribution on retain.

    Formula: minimise w_f mean_t -(2/beta) log sigmoid(-beta log(p_theta(x_t) / p_ref(x_t))) on B_f
    + w_r KL(p_ref || p_theta)(B_r): ascent on token t weighted by 2 p^beta / (p^beta + p_ref^beta).
    The published code adds 1e-5 to that denominator, and averages the divergence over all
    positions, padding too; here over labelled ones.
    Source: Wang et al. 2025 (arXiv 2502.19301); tmlr-group/G-effect (dataloader.py, "tnpo_kl").
    """

    info = MethodInfo(1, "TNPO, Wang et al. 2025 (arXiv 2502.19301)", BOTH)

    class Config(RetainConfig):
        """Settings of TNPO.

        Attributes:
            beta: How soon the weight of a forgotten token fades, per nat; 4, as published.
        """

        average: Literal["samples", "tokens"] = "tokens"
        beta: Positive = 4.0

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms, against one copy of Original."""
        config, reference = self.config, task.reference()
        alpha = getattr(config, "alpha", 0.0)
        return objectives.ForgetRetain(
            objectives.token_preference(reference, config.beta, alpha, self.over),
            objectives.divergence_from(reference, self.over),
            config.forget_weight,
            config.retain_weight,
        )


class WTNPO(TNPO):
    """WTNPO: TNPO weighted by the confidence in the token, so that it fades sooner.

    Formula: TNPO's, each token's loss times p_theta(x_t)^alpha (without gradient).
    Source: Wang et al. 2025 (arXiv 2502.19301); tmlr-group/G-effect (dataloader.py, "wtnpo_kl").
    """

    info = MethodInfo(1, "WTNPO, Wang et al. 2025 (arXiv 2502.19301)", BOTH)

    class Config(TNPO.Config):
        """Settings of WTNPO.

        Attributes:
            alpha: Power of the token's probability in the weight; 1.5, as published.
        """

        alpha: NonNegative = 1.5


class KL(ForgetRetainMethod):
    """KL: gradient ascent on forget, and Original's distribution on retain.

    Formula: minimise -CE(B_f) + KL(p_ref || p_theta)(B_r), p_ref Original's.
    ``compat: tofu`` averages the divergence over all positions, the question's and padding's too,
    and the cross-entropy over tokens, as the TOFU repository (dataloader.py) does with texts padded
    to ``data.max_length`` (500 there), and ``compat: openunlearning`` with texts padded to the
    batch's longest; the default counts labelled positions.
    Source: TOFU, arXiv 2401.06121, sec. 3; the repository locuslab/tofu.
    """

    info = MethodInfo(1, "TOFU, Maini et al. 2024 (arXiv 2401.06121)", BOTH)
    unmasked = {"tofu": ("retain",), "openunlearning": ("retain",)}

    class Config(PaddedConfig):
        padding = {"tofu": "max_length", "openunlearning": "batch"}
        lr: Positive = 3e-5
        compat: Literal["none", "tofu", "openunlearning"] = "none"

    def retain_term(self, task: UnlearnTask) -> objectives.Term:
        """KL to Original."""
        return objectives.divergence_from(task.reference(), self.over)
