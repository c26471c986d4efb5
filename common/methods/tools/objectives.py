"""Objectives of single methods, the bounds of continuous inputs, and UNSIR's noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import IGNORE, Batch, Bounds, Forward, ordered_batches
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.methods.tools.passes import EVALUATION_BATCH
from stable_forgetting.common.methods.tools.streams import Interleaved
from stable_forgetting.common.objectives.objectives import ObjectiveValue
from stable_forgetting.common.objectives.positions import (
    sample_cross_entropy,
    sample_distillation,
    wide,
)
from stable_forgetting.common.train.config import FitConfig


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


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen samples; 0 where there is none."""
    return torch.where(chosen, values, 0.0).sum() / chosen.sum().clamp_min(1)


@dataclass(frozen=True)
class Scrubbing:
    """SCRUB's two losses: samples of the forget set get -KL_T, others gamma CE + alpha KL_T."""

    teacher: Forward
    forgotten: Callable[[Batch], Tensor]
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
    forgotten: Callable[[Batch], Tensor]
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


class AlternatingAscent:
    """-alpha_t sum_i w_i CE_i on the first loader's batches, CE on all others.

    w_i = CE_i^-lam / sum_j CE_j^-lam carries no gradient: samples that are forgotten already weigh
    less.  alpha_t falls from ``alpha`` to 0 along a cosine over ``batches`` batches.

    Attributes:
        forgetting: Whether the last batch was one of the first loader.
    """

    parts: tuple[str, ...] = ("turns",)

    def __init__(self, turns: Interleaved, batches: int, *, alpha: float, lam: float):
        self.turns, self.batches, self.alpha, self.lam = turns, batches, alpha, lam
        self.forgetting = False

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward on the batch whose turn it is."""
        batch = batches["turns"]
        self.forgetting = self.turns.last_turn == 0
        losses = sample_cross_entropy(forward(batch), batch.labels)
        if not self.forgetting:
            loss = losses.mean()
            return ObjectiveValue(loss, {"retain_loss": loss})
        weights = (losses.detach() + 1e-12).pow(-self.lam)
        weighted = (weights / weights.sum() * losses).sum()
        progress = min(1.0, (self.turns.count - 1) / self.batches)
        alpha = self.alpha * 0.5 * (1 + math.cos(math.pi * progress))
        return ObjectiveValue(-alpha * weighted, {"forget_loss": losses.mean()})


class _Noise(nn.Module):
    """Inputs as parameters, in front of a frozen model that is no part of the module tree."""

    def __init__(self, model: nn.Module, start: Mapping[str, Tensor]):
        super().__init__()
        self._frozen = (model,)  # a tuple hides it from parameters() and train()
        self.inputs = nn.ParameterDict({k: nn.Parameter(v) for k, v in start.items()})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = self._frozen[0](*args, **kwargs)
        return logits


@dataclass(frozen=True)
class _Repel:
    """-CE(f(noise), label) + decay * mean squared norm of a noise sample."""

    noise: _Noise
    label: int
    decay: float
    parts: tuple[str, ...] = ()

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        inputs = dict(self.noise.inputs.items())
        size = len(next(iter(inputs.values())))
        device = next(iter(inputs.values())).device
        labels = torch.full((size,), self.label, device=device)
        loss = sample_cross_entropy(
            forward(Batch(inputs, labels, torch.arange(size))), labels
        ).mean()
        squares = [tensor.flatten(1).square().sum(1) for tensor in inputs.values()]
        norm = torch.stack(squares).sum(0).mean()
        return ObjectiveValue(self.decay * norm - loss, {"noise_loss": loss, "noise_norm": norm})


def learn_noise(
    task: UnlearnTask, classes: list[int], *, samples: int, config: FitConfig, decay: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Noise inputs and labels of all classes.

    Returns:
        Name -> (len(classes) * M, ...) and (len(classes) * M,) int64, on the source's device.
    """
    example = task.source.fetch(torch.as_tensor(task.indices("retain")[:1]))
    continuous(example, "unsir")
    inputs: dict[str, list[Tensor]] = {name: [] for name in example.inputs}
    for label in classes:
        stream = task.generator("noise", label)
        start = {
            name: torch.randn(samples, *tensor.shape[1:], generator=stream).to(tensor)
            for name, tensor in example.inputs.items()
        }
        noise = _Noise(task.frozen_copy(), start)
        task.fit(noise, _Repel(noise, label, decay), {}, config, more=True)
        for name, tensor in noise.inputs.items():
            inputs[name].append(tensor.detach())
    labels = torch.tensor(classes, device=example.labels.device).repeat_interleave(samples)
    return {name: torch.cat(tensors) for name, tensors in inputs.items()}, labels
