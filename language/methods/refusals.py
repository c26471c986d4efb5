"""Methods that train on other answers: IDK, mismatch; DPO and FLAT on pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, FORGET, MethodInfo
from stable_forgetting.common.methods.forget_retain import (
    ForgetConfig,
    ForgetRetainMethod,
    RetainConfig,
)
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from stable_forgetting.common.data.access import GuardedSource
    from stable_forgetting.language.methods.preference import RefusalPreference


def refusing(task: UnlearnTask, templates: Sequence[str] = ()) -> GuardedSource:
    """The task's data with a refusal, drawn once per forget sample, as each one's answer.

    Raises:
        ConfigError: The data come without refusals, and no templates are given in their place.
    """
    refusals = templates or task.source.refusals
    if not refusals:
        raise ConfigError(
            "the data bring no refusals (plain texts have none); choose data that do, such as TOFU,"
            " or a method with templates, such as flat"
        )
    return answering(task, refusals, "refusals")


def answering(task: UnlearnTask, answers: Sequence[Any], stream: str) -> GuardedSource:
    """The task's data with one of the answers, drawn once per forget sample, as each one's own."""
    import torch

    indices = task.indices("forget")
    drawn = torch.randint(len(answers), (len(indices),), generator=task.generator(stream))
    return task.source.with_answers(
        {int(i): answers[int(d)] for i, d in zip(indices, drawn, strict=True)}
    )


def mismatching(task: UnlearnTask, method: str, stream: str) -> GuardedSource:
    """The task's data with the answer of a random retain sample as each forget sample's own.

    Raises:
        ConfigError: The data have no answers.
    """
    others = task.source.answers_of(task.indices("retain"))
    if not others:
        raise ConfigError(
            f"{method} takes answers to other questions, and these samples have none; leave it out"
        )
    return answering(task, others, stream)


class IDK(ForgetRetainMethod):
    """IDK: fine-tune on refusals for forget questions and on the retain set.

    Formula: minimise w_f CE(y_idk | B_f) + w_r CE(B_r).  ``compat: tofu`` takes one mean over the
    tokens of both batches together, as that code does, where refusals weigh little, being short.
    Source: TOFU, arXiv 2401.06121; locuslab/tofu (dataloader.py).  A refusal is drawn once per
    sample there each time it is read, here once per run.
    """

    info = MethodInfo(1, "TOFU, Maini et al. 2024 (arXiv 2401.06121)", BOTH, modality="language")

    class Config(RetainConfig):
        """Settings of IDK.

        Attributes:
            compat: Whose code is followed where it differs from the formula; by default nobody's.
        """

        pooled: ClassVar[str] = "tofu"
        later: ClassVar[Mapping[str, Any]] = {**RetainConfig.later, "compat": "none"}
        compat: Literal["none", "tofu"] = "none"

        @model_validator(mode="after")
        def _pooled_has_no_weights(self) -> IDK.Config:
            weights = (self.forget_weight, self.retain_weight)
            if self.compat == self.pooled and weights != (1.0, 1.0):
                raise ValueError(
                    f"compat: {self.pooled} pools both batches; leave the weights at 1"
                )
            return self

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Two terms, or one mean over both batches."""
        pooled = self.config.compat == self.Config.pooled
        return objectives.PooledCrossEntropy() if pooled else super().prepare(task)

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """Cross-entropy on the refusal."""
        return objectives.Mean(objectives.cross_entropy, self.config.average)

    def loaders(self, task: UnlearnTask, parts: Sequence[str], config: FitConfig) -> Any:
        """Forget questions come with other answers."""
        streams = task.loaders(parts, config)
        streams["forget"].source = self.answers(task)
        return streams

    def answers(self, task: UnlearnTask) -> GuardedSource:
        """Forget questions with refusals."""
        return refusing(task)


class Mismatch(IDK):
    """Mismatch: fine-tune on forget questions with answers to other questions, and on retain.

    Formula: minimise w_f CE(y' | B_f) + w_r CE(B_r), y' the answer of a random retain sample, drawn
    once per run.  A plain text has no question: it is replaced whole by another one.
    ``compat: flat`` averages over the tokens of both batches together and takes no weights, as that
    code does; its y' are texts from C4, which no data here bring.
    Source: LLMU, arXiv 2310.10683; FLAT, arXiv 2410.11143, and its repository (dataloader.py).
    """

    info = MethodInfo(1, "LLMU, Yao et al. 2023 (arXiv 2310.10683)", BOTH, modality="language")

    class Config(IDK.Config):
        """Settings of Mismatch.

        Attributes:
            compat: Whose code is followed where it differs from the formula; by default nobody's.
        """

        pooled = "flat"
        later: ClassVar[Mapping[str, Any]] = RetainConfig.later
        compat: Literal["none", "flat"] = "none"  # type: ignore[assignment]

    def answers(self, task: UnlearnTask) -> GuardedSource:
        """Forget questions with answers of retain samples."""
        return mismatching(task, "mismatch", "mismatch")


class DPO(ForgetRetainMethod):
    """DPO: prefer a refusal to the true answer, relative to Original; no retain data.

    Formula: minimise -(2/beta) mean log sigmoid(beta [log r(y_idk) - log r(y)]), log r =
    log p_theta - log p_ref, log p summed over the answer.  Pairs are matched by index.
    ``compat``: ``tofu`` has factor 1 for 2/beta (Rafailov et al.); ``flat`` has log r = log p_theta
    (no reference); ``loku`` minimises CE(y_idk | B_f) alone, which is what that repository's "dpo"
    runs.  open-unlearning is the default here, with a retain term: see ``dpo_gdr``.
    Source: arXiv 2305.18290; TOFU, arXiv 2401.06121; open-unlearning (trainer/unlearn/dpo.py).
    """

    info = MethodInfo(
        1, "Rafailov et al. 2023 (arXiv 2305.18290), as in TOFU", FORGET, modality="language"
    )

    class Config(ForgetConfig):
        """Settings of DPO.

        Attributes:
            beta: How soon a preference counts as learnt, per nat; .1, as in TOFU and in
                open-unlearning.
            compat: Whose code is followed where it differs from the formula; by default nobody's.
        """

        beta: Positive = 0.1
        compat: Literal["none", "tofu", "flat", "loku"] = "none"

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """The preference loss over pairs, and the retain term where there is one."""
        config: Any = self.config
        other, indices = self.preferred(task), task.indices("forget")

        def table(source: data.Source) -> objectives.LogLikelihoods | None:
            if config.compat in ("flat", "loku"):
                return None
            return tools.reference_likelihoods(task, indices, config, source)

        return self.pairs()(
            refusals=other,
            answer_reference=table(task.source),
            refusal_reference=table(other),
            beta=config.beta,
            factor=1.0 if config.compat == "tofu" else 2.0 / config.beta,
            imitate=config.compat == "loku",
            over=config.average,
            forget_weight=config.forget_weight,
            retain=self.retain_term(task),
            retain_weight=getattr(config, "retain_weight", 0.0),
        )

    def pairs(self) -> type[RefusalPreference]:
        """The loss of a pair."""
        from stable_forgetting.language.methods.preference import RefusalPreference

        return RefusalPreference

    def preferred(self, task: UnlearnTask) -> GuardedSource:
        """Forget questions with the answers to prefer: refusals."""
        return refusing(task)


class DPOGdr(DPO):
    """DPO + GDR: prefer a refusal to the true answer, and descend on retain.

    Formula: DPO's on forget + w_r CE(B_r); open-unlearning's "DPO".
    """

    info = MethodInfo(
        1,
        "Rafailov et al. 2023 (arXiv 2305.18290), as in open-unlearning",
        BOTH,
        modality="language",
    )

    class Config(RetainConfig, DPO.Config):
        """Settings of DPO + GDR: those of DPO, and of a retain term."""


class FLAT(ForgetRetainMethod):
    """FLAT: prefer a template answer to the true one by an f-divergence; forget data alone.

    Formula: minimise mean f*(g(P_f)) - g(P_e), P_e and P_f the mean probability of the tokens of
    the template answer and of the true one, per sample:

    - tv: tanh(P_f) / 2 - tanh(P_e) / 2
    - kl: exp(P_f - 1) - P_e
    - js: log(1 + e^P_f) + log(1 + e^-P_e) - 2 log 2
    - pearson: P_f^2 / 4 + P_f - P_e

    A plain text has no question: the template stands for the whole text.  ``compat: flat`` takes
    one mean over the batch before g and f*, over every position of texts padded to
    ``padded_length``, masked ones as 0; so batch size and padding scale the loss, as they do there.
    What that code feeds is not repeated: its released task pairs the template's labels with the
    true answer's ids.
    Source: FLAT, arXiv 2410.11143; UCSC-REAL/FLAT (dataloader.py).
    """

    info = MethodInfo(1, "FLAT, Wang et al. 2024 (arXiv 2410.11143)", FORGET, modality="language")

    class Config(ForgetConfig):
        """Settings of FLAT.

        Attributes:
            divergence: Which f-divergence: ``tv``, ``kl`` (the default), ``js`` or ``pearson``.
            templates: The answers to prefer; those that the data bring, when empty.
            compat: Whose code is followed where it differs from the formula; by default nobody's.
            padded_length: Tokens to which ``compat: flat`` pads a text; 512, as in that code.
        """

        divergence: Literal["tv", "kl", "js", "pearson"] = "kl"
        templates: tuple[str, ...] = ()
        compat: Literal["none", "flat"] = "none"
        padded_length: Annotated[int, Field(ge=2)] = 512

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """The divergence over pairs."""
        from stable_forgetting.language.methods.preference import RefusalDivergence

        config: Any = self.config
        return RefusalDivergence(
            refusals=refusing(task, config.templates),
            divergence=objectives.DIVERGENCES[config.divergence],
            diluted=config.padded_length - 1 if config.compat == "flat" else None,
            forget_weight=config.forget_weight,
        )
