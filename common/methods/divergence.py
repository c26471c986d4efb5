"""KL: ascend on forget, stay close to Original on retain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from stable_forgetting.common.base.numbers import Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, PaddedConfig
from stable_forgetting.common.methods.simple import BOTH
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from stable_forgetting.common.data.batch import Batch
    from stable_forgetting.common.objectives.terms import Term


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

    class Config(PaddedConfig):
        """Settings of KL.

        Attributes:
            compat: Whose code is followed where it differs from the formula; by default nobody's.
        """

        padding = {"tofu": "max_length", "openunlearning": "batch"}
        lr: Positive = 3e-5
        compat: Literal["none", "tofu", "openunlearning"] = "none"

    def retain_term(self, task: UnlearnTask) -> Term:
        """KL to Original."""
        from stable_forgetting.common.objectives.terms import Divergence

        return Divergence(task.reference(), self.over)

    def views(self, task: UnlearnTask) -> Mapping[str, Callable[[Batch], Batch]]:
        """Every position of retain texts, with a ``compat``."""
        from stable_forgetting.common.data.batch import every_position

        if self.config.compat == "none":
            return {}
        return {"retain": every_position(task.source, self.config.pad_to)}

    @property
    def over(self) -> Literal["samples", "tokens"]:
        """Over tokens, with a ``compat``."""
        return super().over if self.config.compat == "none" else "tokens"
