"""Methods that train on refusals: IDK, and DPO with the refusal as the preferred answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from common.base.errors import ConfigError
from common.base.numbers import Positive
from common.methods.base import MethodInfo
from common.methods.forget_retain import ForgetConfig, ForgetRetainMethod, RetainConfig
from common.methods.simple import BOTH
from common.methods.task import UnlearnTask
from common.train.config import FitConfig

if TYPE_CHECKING:
    from common.data.access import GuardedSource
    from common.data.batch import Source
    from common.objectives.objectives import Objective
    from common.objectives.terms import Term


def refusing(task: UnlearnTask) -> GuardedSource:
    """The task's data with a refusal, drawn once per forget sample, as each one's answer.

    Raises:
        ConfigError: The data come without refusals.
    """
    import torch

    refusals = task.source.refusals
    if not refusals:
        raise ConfigError(
            "the data bring no refusals (plain texts have none); choose data that do, such as TOFU"
        )
    indices = task.indices("forget")
    drawn = torch.randint(len(refusals), (len(indices),), generator=task.generator("refusals"))
    return task.source.with_answers(
        {int(i): refusals[int(d)] for i, d in zip(indices, drawn, strict=True)}
    )


class IDK(ForgetRetainMethod):
    """IDK: fine-tune on refusals for forget questions and on the retain set.

    Formula: minimise w_f CE(y_idk | B_f) + w_r CE(B_r).  The published code averages over the
    tokens of both batches together; ``average: tokens`` does over those of each.
    Source: TOFU, arXiv 2401.06121; locuslab/tofu (dataloader.py).  A refusal is drawn once per
    sample there each time it is read, here once per run.
    """

    info = MethodInfo(1, "TOFU, Maini et al. 2024 (arXiv 2401.06121)", BOTH, modality="language")

    def forget_term(self, task: UnlearnTask) -> Term:
        """Cross-entropy on the refusal."""
        from common.objectives.positions import cross_entropy
        from common.objectives.terms import Mean

        return Mean(cross_entropy, self.config.average)

    def loaders(self, task: UnlearnTask, parts: Sequence[str], config: FitConfig) -> Any:
        """Forget questions come with refusals."""
        streams = task.loaders(parts, config)
        streams["forget"].source = refusing(task)
        return streams


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
        1,
        "Rafailov et al. 2023 (arXiv 2305.18290), as in TOFU",
        frozenset({"forget"}),
        modality="language",
    )

    class Config(ForgetConfig):
        beta: Positive = 0.1
        compat: Literal["none", "tofu", "flat", "loku"] = "none"

    def prepare(self, task: UnlearnTask) -> Objective:
        """The preference loss over pairs, and the retain term where there is one."""
        from common.methods.tools.passes import reference_likelihoods
        from common.objectives.terms import LogLikelihoods
        from language.methods.preference import RefusalPreference

        config: Any = self.config
        other, indices = refusing(task), task.indices("forget")

        def table(source: Source) -> LogLikelihoods | None:
            if config.compat in ("flat", "loku"):
                return None
            return reference_likelihoods(
                task,
                indices,
                source=source,
                batch_size=config.batch_size,
                precision=config.mixed_precision,
            )

        return RefusalPreference(
            other,
            table(task.source),
            table(other),
            beta=config.beta,
            factor=1.0 if config.compat == "tofu" else 2.0 / config.beta,
            imitate=config.compat == "loku",
            over=config.average,
            forget_weight=config.forget_weight,
            retain=self.retain_term(task),
            retain_weight=getattr(config, "retain_weight", 0.0),
        )


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

    class Config(RetainConfig):
        beta: Positive = 0.1
        compat: Literal["none", "tofu", "flat", "loku"] = "none"
