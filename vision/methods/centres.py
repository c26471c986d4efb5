"""The objective of DUCK: the way of features to the centres of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives.objectives import ObjectiveValue, joint_logits
from stable_forgetting.common.objectives.positions import wide
from stable_forgetting.vision.methods.contrast import HeadInputs


@dataclass(frozen=True)
class Centres:
    """Cosine distance of forget features to their centres, and tempered CE on retain.

    Attributes:
        features: Watching the model that is trained.
        members: (M,) int64, CPU, sorted: the forget images.
        goals: (M, d) the centre that each goes to.
        forget_weight: Factor of the distance.
        retain_weight: Factor of the cross-entropy.
        temperature: Divides the retain logits.
    """

    features: HeadInputs
    members: Tensor
    goals: Tensor
    forget_weight: float
    retain_weight: float
    temperature: float
    parts: tuple[str, ...] = ("forget", "retain")

    @classmethod
    def of(
        cls,
        task: UnlearnTask,
        features: HeadInputs,
        forget_weight: float,
        retain_weight: float,
        temperature: float,
    ) -> Centres:
        """With centres and goals of the task's model as it is now; ``features`` watches it.

        Raises:
            ConfigError: A forget image has no other class among the retain images.
        """
        head = tools.head_name(task)
        kept, labels = tools.head_inputs(task, head, task.indices("retain"))
        known = labels.unique()
        centres = torch.stack([wide(kept)[labels == label].mean(0) for label in known])
        gone, own = tools.head_inputs(task, head, task.indices("forget"))
        barred = own.unsqueeze(1) == known
        if bool(barred.all(1).any()):
            raise ConfigError(
                "a forget image moves to another class, and the retain images have none but its "
                "own; add retain images of other classes"
            )
        goals = nearest(wide(gone), centres, barred)
        members = torch.as_tensor(task.indices("forget"))
        return cls(features, members, goals, forget_weight, retain_weight, temperature)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward of both batches, whose features are kept beside."""
        forget, retain = batches["forget"], batches["retain"]
        _, z = joint_logits(forward, [forget, retain])
        assert self.features.latest is not None
        features = wide(self.features.latest[: len(forget)])
        places = torch.searchsorted(self.members, forget.indices)
        goals = self.goals[places.to(self.goals.device)]
        distance = (1 - F.cosine_similarity(features, goals)).mean()
        loss = F.cross_entropy(wide(z) / self.temperature, retain.labels)
        total = self.forget_weight * distance + self.retain_weight * loss
        return ObjectiveValue(total, {"centre_distance": distance, "tempered_loss": loss})


def nearest(features: Tensor, centres: Tensor, barred: Tensor) -> Tensor:
    """(N, d) of the centres (C, d), the nearest by cosine to each feature where not barred."""
    cosines = F.normalize(features, dim=1) @ F.normalize(centres, dim=1).mT
    return centres[cosines.masked_fill(barred, -torch.inf).argmax(1)]
