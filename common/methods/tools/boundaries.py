"""Objectives of boundary unlearning, and the bounds of continuous inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.data.batch import IGNORE, Batch, Bounds, Forward, ordered_batches
from common.methods.task import UnlearnTask
from common.methods.tools.passes import EVALUATION_BATCH
from common.objectives.objectives import ObjectiveValue
from common.objectives.positions import sample_cross_entropy


def continuous(batch: Batch, what: str) -> None:
    """Raises :class:`ConfigError` where an input is not real-valued (token ids)."""
    for name, tensor in batch.inputs.items():
        if not tensor.is_floating_point():
            raise ConfigError(
                f"{what} moves inputs along a gradient, but input '{name}' is discrete; choose "
                "another method for these data"
            )


def input_bounds(task: UnlearnTask) -> Bounds:
    """Input name -> (low, high), which broadcast over a sample.

    A source may know them; otherwise they are the smallest and the largest value on D_f.
    """
    bounds = task.source.input_bounds
    if bounds is not None:
        return bounds
    lows: dict[str, list[Tensor]] = {}
    highs: dict[str, list[Tensor]] = {}
    for batch in ordered_batches(task.source, task.indices("forget"), EVALUATION_BATCH):
        for name, tensor in batch.inputs.items():
            lows.setdefault(name, []).append(tensor.min())
            highs.setdefault(name, []).append(tensor.max())
    return {name: (torch.stack(lows[name]).min(), torch.stack(highs[name]).max()) for name in lows}


@dataclass(frozen=True)
class ToNeighbours:
    """Cross-entropy towards the class that one signed gradient step leads to."""

    frozen: Forward
    bounds: Bounds
    attack_step: float
    parts: tuple[str, ...] = ("forget",)

    @classmethod
    def of(cls, task: UnlearnTask, attack_step: float) -> ToNeighbours:
        """Attacks a frozen copy of the task's model as it is now."""
        model = task.frozen_copy()
        first = task.source.fetch(torch.as_tensor(task.indices("forget")[:1]))
        continuous(first, "boundary_shrink")
        return cls(lambda batch: task.forward(model, batch), input_bounds(task), attack_step)

    def neighbours(self, batch: Batch) -> Tensor:
        """(N,) classes after the step."""
        with torch.enable_grad():
            inputs = {k: v.detach().clone().requires_grad_() for k, v in batch.inputs.items()}
            logits = self.frozen(Batch(inputs, batch.labels, batch.indices))
            loss = sample_cross_entropy(logits, batch.labels).sum()
            grads = torch.autograd.grad(loss, list(inputs.values()))
        moved = {}
        for (name, value), grad in zip(inputs.items(), grads, strict=True):
            low, high = self.bounds[name]
            step = value.detach() + self.attack_step * (high - low) * grad.sign()
            moved[name] = step.clamp(low, high)
        with torch.no_grad():
            return self.frozen(Batch(moved, batch.labels, batch.indices)).argmax(-1)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One attack step on the copy, one forward."""
        batch = batches["forget"]
        labels = torch.where(batch.labels == IGNORE, IGNORE, self.neighbours(batch))
        loss = sample_cross_entropy(forward(batch), labels).mean()
        moved = (labels != batch.labels).float().mean()
        return ObjectiveValue(loss, {"neighbour_loss": loss, "relabelled_share": moved})


@dataclass(frozen=True)
class ToOneClass:
    """Cross-entropy of the forget batch towards one class."""

    label: int
    parts: tuple[str, ...] = ("forget",)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Every counted label becomes that class."""
        batch = batches["forget"]
        labels = torch.where(batch.labels == IGNORE, IGNORE, self.label)
        loss = sample_cross_entropy(forward(batch), labels).mean()
        return ObjectiveValue(loss, {"shadow_loss": loss})
