"""Who's Harry Potter as a generation-time method: two models answer as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import NonNegative
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.methods.task_vector import PUBLISHED, ReinforcedConfig, reinforce
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import nn


class WHP(UnlearningMethod):
    """WHP: take off the logits what fine-tuning on forget raised, each time the model is asked.

    Formula: v = v_b - a ReLU(v_r - v_b), v_b Original's logits, v_r those of Original fine-tuned on
    forget.  A generation-time method: both models answer, both are stored, and there is no single
    checkpoint to write.  Never reads retain data.
    Source: Eldan and Russinovich 2023, arXiv 2310.02238, which then relabels texts and fine-tunes
    on them; swj0419/muse_bench (whos_harry_potter.py), which does this alone.
    """

    info = MethodInfo(
        1,
        "Eldan and Russinovich 2023 (arXiv 2310.02238), as in MUSE (arXiv 2407.06460)",
        frozenset({"forget"}),
        modality="language",
        models=2,
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PUBLISHED

    class Config(ReinforcedConfig):
        """Settings of WHP.

        Attributes:
            a: How much of the rise of a logit is taken off; 1, as in muse_bench's class (MUSE's
                authors evaluate 4 on News and 256 on Books).
        """

        a: NonNegative = 1.0

    @classmethod
    def vessel(cls, config: Strict, build: Callable[[], nn.Module]) -> nn.Module:
        """Both models, joined."""
        from stable_forgetting.language.models.composite import LogitDifference

        return LogitDifference(build(), build(), config.a)  # type: ignore[attr-defined]

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes on forget, and joins the result with what it came from."""
        baseline = task.frozen_copy()
        reinforce(task, FitConfig.of(self.config))
        models = iter([baseline, task.model])
        return self.vessel(self.config, lambda: next(models))
