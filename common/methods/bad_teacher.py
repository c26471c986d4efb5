"""Bad Teacher: an incompetent teacher for forget, a competent one for retain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common.base.numbers import NonNegative, Positive
from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import GradientMethod, ShortConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stable_forgetting.common.data.loader import Loader
    from stable_forgetting.common.methods.task import UnlearnTask
    from stable_forgetting.common.objectives.objectives import Objective
    from stable_forgetting.common.train.config import FitConfig


class BadTeacher(GradientMethod):
    """Bad Teacher: distil an untrained model on forget and Original on retain.

    Formula: with l = 1 on D_f and 0 on D_r, over shuffled D_f u D_r,
        minimise mean over samples of KL( l softmax(t_b/T) + (1-l) softmax(t_c/T) || softmax(s/T) )
    t_c is Original; t_b is the model before any training (with pretrained weights: those, under a
    new head); neither is trained.  The mean is over samples only, not over classes too.

    Source: Chundawat et al. 2023, arXiv 2205.08096; its repository and SSD's, whose settings for a
    ViT are the default: Adam at 1e-4, a constant rate, no weight decay (AdamW without decay is
    Adam), .3 of the retain set, drawn once (``retain_share``).  They make one pass with batches of
    128 (preset ``repository_vit``); the default is ours, three with 64, as small sets have few
    batches.  Their KL is averaged over classes, too, which Adam's rate does not feel.
    """

    info = MethodInfo(
        2,
        "Chundawat et al. 2023 (arXiv 2205.08096)",
        frozenset({"forget", "retain", "initial"}),
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "repository_vit": {"epochs": 1, "batch_size": 128},
    }

    class Config(ShortConfig):
        """Settings of Bad Teacher.

        Attributes:
            temperature: Divides all logits before the softmax; 1, as published.
            retain_share: Share of the retain set that is distilled, drawn once; .3, as published.
        """

        weight_decay: NonNegative = 0.0
        schedule: Literal["constant", "linear", "cosine"] = "constant"
        temperature: Positive = 1.0
        retain_share: Annotated[float, Field(gt=0, le=1)] = 0.3

    def prepare(self, task: UnlearnTask) -> Objective:
        """Distillation from both teachers."""
        from stable_forgetting.common.methods.tools.objectives import TwoTeachers
        from stable_forgetting.common.methods.tools.streams import Members

        untrained = task.fresh_model().requires_grad_(False).eval()
        return TwoTeachers(
            task.reference(),
            lambda batch: task.forward(untrained, batch),
            Members(task.indices("forget")),
            self.config.temperature,
        )

    def loaders(
        self, task: UnlearnTask, parts: Sequence[str], config: FitConfig
    ) -> dict[str, Loader]:
        """One shuffled stream over the forget set and a share of the retain set."""
        import numpy as np
        import torch

        from stable_forgetting.common.data.loader import Loader

        retain = task.indices("retain")
        order = torch.randperm(len(retain), generator=task.generator("retain share")).numpy()
        chosen = retain[order[: max(1, round(self.config.retain_share * len(retain)))]]
        indices = np.sort(np.concatenate([task.indices("forget"), chosen]))
        stream = task.generator("batches", "mixed")
        return {"mixed": Loader(task.source, indices, config.micro_batch, stream)}
