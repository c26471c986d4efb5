"""ME + GD: make the model undecided on forget data instead of wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common.base.numbers import NonNegative
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, PaddedConfig
from stable_forgetting.common.methods.simple import BOTH
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from stable_forgetting.common.data.batch import Batch
    from stable_forgetting.common.objectives.terms import Term


class MEGD(ForgetRetainMethod):
    """ME + GD: maximise the entropy of forget answers, descend on retain.

    Formula: minimise w_f mean KL(U || p_theta)(B_f) + CE(B_r); the minimum of the first is the
    uniform distribution.
    ``compat: published`` is the repository's default ``mask: false``: the entropy runs over the
    question, the answer and the padding up to ``data.max_length`` (500 there) but for the last
    position, with 1e-12 inside the logarithm, and cross-entropy is averaged over tokens.
    Source: arXiv 2410.08109; sail-sg/closer-look-LLM-unlearning (w_f 0.1 on TOFU, 1 in sequences).
    """

    info = MethodInfo(1, "ME+GD, Yuan et al. 2025 (arXiv 2410.08109)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tofu_llama2": {
            "compat": "published",
            "lr": 1e-5,
            "epochs": 5,
            "batch_size": 32,
            "weight_decay": 0.01,
            "schedule": "linear",
            "warmup_epochs": 1.0,
            "timing": "transformers",
        }
    }

    class Config(PaddedConfig):
        """Settings of ME + GD.

        Attributes:
            compat: Whose code is followed where it differs from the formula; by default nobody's.
        """

        padding = {"published": "max_length"}
        forget_weight: NonNegative = 0.1
        compat: Literal["none", "published"] = "none"

    def forget_term(self, task: UnlearnTask) -> Term:
        """The divergence from uniform."""
        from stable_forgetting.common.objectives.positions import divergence_from_uniform
        from stable_forgetting.common.objectives.terms import Mean

        floor = 1e-12 if self.config.compat == "published" else 0.0
        return Mean(partial(divergence_from_uniform, floor=floor), self.over)

    def views(self, task: UnlearnTask) -> Mapping[str, Callable[[Batch], Batch]]:
        """Every position of forget texts, as published."""
        from stable_forgetting.common.data.batch import every_position, predicting

        if self.config.compat != "published":
            return {}
        every = every_position(task.source, self.config.pad_to)
        return {"forget": lambda batch: predicting(every(batch))}

    @property
    def over(self) -> Literal["samples", "tokens"]:
        """Over tokens, as published."""
        return "tokens" if self.config.compat == "published" else super().over
