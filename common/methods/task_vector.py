"""Methods that fine-tune on what is to be forgotten, and go the other way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


class ReinforcedConfig(FitConfig):
    """How the model is fine-tuned on forget data; muse_bench: lr 1e-5, cosine, AdamW."""

    epochs: Count | None = 10
    batch_size: Count = 16
    lr: Positive = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "cosine"


PUBLISHED: Mapping[str, Mapping[str, Any]] = {"muse_bench": {"lr": 1e-5, "batch_size": 4}}
"""The effective batch of four follows from 102 steps an epoch on 408 chunks of News."""


def reinforce(task: UnlearnTask, config: FitConfig) -> None:
    """Fine-tunes ``task.model`` on the forget set in place.

    Args:
        task: Whose model.
        config: Of the training.
    """
    objective = objectives.CrossEntropy("forget", config.average)
    task.fit(task.model, objective, task.loaders(["forget"], config), config)


class TaskVector(UnlearningMethod):
    """Task vector: fine-tune on forget, then go as far the other way, times a factor.

    Formula: theta <- theta - a (theta_ft - theta), theta_ft = argmin CE(B_f) from theta; every
    floating-point tensor.  Never reads retain data.
    Source: Ilharco et al. 2023, arXiv 2212.04089; MUSE, arXiv 2407.06460 (a = 5, 10 epochs);
    swj0419/muse_bench (task_vector.py).
    """

    info = MethodInfo(
        1,
        "Ilharco et al. 2023 (arXiv 2212.04089); MUSE (arXiv 2407.06460)",
        frozenset({"forget"}),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PUBLISHED

    class Config(ReinforcedConfig):
        """Settings of Task vector.

        Attributes:
            a: How far to go back, in lengths of the fine-tuning; 5, as in muse_bench's script
                (MUSE's authors evaluate 16 on News and 1 on Books).
        """

        a: NonNegative = 5.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes, then extrapolates."""
        import torch

        start = {key: value.clone() for key, value in _tensors(task.model).items()}
        reinforce(task, FitConfig.of(self.config))
        with torch.no_grad():
            for key, tuned in _tensors(task.model).items():
                tuned.copy_(start[key] - self.config.a * (tuned - start[key]))
        return task.model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name -> each floating-point tensor of the state once, tied ones under their first name."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stored = model.state_dict().keys()
    return {
        name: value.detach()
        for name, value in state.items()
        if name in stored and value.is_floating_point()
    }
