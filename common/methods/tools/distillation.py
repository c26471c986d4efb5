"""Objectives of students with teachers; the teachers' parameters are never trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.data.batch import Batch, Forward
from common.methods.tools.streams import Members
from common.objectives.objectives import ObjectiveValue
from common.objectives.positions import sample_cross_entropy, sample_distillation, wide


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen samples; 0 where there is none."""
    return torch.where(chosen, values, 0.0).sum() / chosen.sum().clamp_min(1)


@dataclass(frozen=True)
class Scrubbing:
    """SCRUB's two losses: samples of the forget set get -KL_T, others gamma CE + alpha KL_T."""

    teacher: Forward
    forgotten: Members
    temperature: float
    gamma: float
    alpha: float
    parts: tuple[str, ...] = ("turns",)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward of the student, one of the teacher."""
        batch = batches["turns"]
        forget = self.forgotten(batch)
        logits = forward(batch)
        target = (wide(self.teacher(batch)) / self.temperature).softmax(-1)
        distance = sample_distillation(wide(logits) / self.temperature, target, batch.labels)
        distance = self.temperature**2 * distance
        away, close = _mean(distance, forget), _mean(distance, ~forget)
        loss = _mean(sample_cross_entropy(logits, batch.labels), ~forget)
        total = self.gamma * loss + self.alpha * close - away
        return ObjectiveValue(total, {"forget_kl": away, "retain_kl": close, "retain_loss": loss})


@dataclass(frozen=True)
class TwoTeachers:
    """Bad Teacher: follow the incompetent teacher on forget, the competent one on retain."""

    competent: Forward
    incompetent: Forward
    forgotten: Members
    temperature: float
    parts: tuple[str, ...] = ("mixed",)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward of the student, one of each teacher."""
        batch = batches["mixed"]
        forget = self.forgotten(batch)
        good, bad = self.competent(batch), self.incompetent(batch)
        chosen = forget.view(-1, *(1 for _ in good.shape[1:]))
        target = (wide(torch.where(chosen, bad, good)) / self.temperature).softmax(-1)
        logits = wide(forward(batch)) / self.temperature
        distance = sample_distillation(logits, target, batch.labels)
        parts = {"forget_kl": _mean(distance, forget), "retain_kl": _mean(distance, ~forget)}
        return ObjectiveValue(distance.mean(), parts)
