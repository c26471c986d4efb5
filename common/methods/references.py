"""Original and Retrain: the references of every comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod, train_reference
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import nn


class Original(UnlearningMethod):
    """The model before unlearning: what doing nothing scores.

    Formula: theta stays what minimising CE over D_f u D_r has made of it.
    """

    info = MethodInfo(1, "-", frozenset(), changes_model=False)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Returns the model as it is."""
        return task.model


class Retrain(UnlearningMethod):
    """The target: trained on the retain set alone, with Original's recipe and from another start.

    Formula: minimise CE(B_r) from a fresh start.
    Source: exact unlearning as defined by Bourtoule et al. 2021, arXiv 1912.03817.

    No Retrain shares its start with Original or with another Retrain, so that none is nearer to a
    model that comes of Original than the others are.
    """

    info = MethodInfo(2, "exact unlearning", frozenset({"retain", "initial"}))

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains a fresh model."""
        return train_reference(task, ["retain"])
