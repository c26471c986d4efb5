"""Objectives on moved inputs, and on gradients by the input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.objectives.objectives import ObjectiveValue, joint_logits
from stable_forgetting.common.objectives.positions import sample_cross_entropy, wide
from stable_forgetting.common.train.protocols import ModelForward


def _with(batch: Batch, pixels: Tensor) -> Batch:
    (name,) = batch.inputs
    return Batch({name: pixels}, batch.labels, batch.indices)


def _pixels(batch: Batch) -> Tensor:
    (pixels,) = batch.inputs.values()
    return pixels


@dataclass(frozen=True)
class Adversarial:
    """Cross-entropy on adversarial examples with Original's answers, and on retain; see ``AMUN``.

    Attributes:
        run: (model, batch) -> logits.
        frozen: Original.
        radius: First length of the move.
        doublings: How often it may be doubled.
    """

    run: ModelForward
    frozen: nn.Module
    radius: float
    doublings: int
    steps: int
    retain_weight: float
    parts: tuple[str, ...] = ("forget", "retain")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One attack on the copy, one forward."""
        moved, labels = self.attacked(batches["forget"])
        retain = batches["retain"]
        z_moved, z_retain = joint_logits(forward, [moved, retain])
        adversarial = sample_cross_entropy(z_moved, labels).mean()
        kept = sample_cross_entropy(z_retain, retain.labels).mean()
        fooled = (labels != batches["forget"].labels).float().mean()
        logged = {"adversarial_loss": adversarial, "retain_loss": kept, "fooled_share": fooled}
        return ObjectiveValue(adversarial + self.retain_weight * kept, logged)

    def attacked(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The moved batch, and the (N,) classes that Original gives it."""
        pixels = _pixels(batch).clone()
        answers = self._answers(batch)
        radius = self.radius
        for _ in range(self.doublings + 1):
            held = answers == batch.labels
            if not bool(held.any()):
                break
            moved = self._moved(batch, radius)
            pixels = torch.where(held.view(-1, *(1,) * (pixels.ndim - 1)), moved, pixels)
            answers = torch.where(held, self._answers(_with(batch, moved)), answers)
            radius *= 2
        return _with(batch, pixels), answers

    def _answers(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.run(self.frozen, batch).argmax(-1)

    def _moved(self, batch: Batch, radius: float) -> Tensor:
        pixels = _pixels(batch).detach()
        for _ in range(self.steps):
            with torch.enable_grad():
                probe = pixels.detach().requires_grad_()
                logits = self.run(self.frozen, _with(batch, probe))
                loss = sample_cross_entropy(logits, batch.labels).sum()
                (gradient,) = torch.autograd.grad(loss, [probe])
            length = gradient.flatten(1).norm(dim=1).clamp_min(1e-12)
            length = length.view(-1, *(1,) * (pixels.ndim - 1))
            pixels = pixels + radius / self.steps * gradient / length
        return pixels


@dataclass(frozen=True)
class Sensitivity:
    """Mean ||grad_x z_y||^2 - w ||grad_x z_c||^2; see ``MUMis``."""

    other_weight: float
    parts: tuple[str, ...] = ("forget",)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Attention without a second derivative is left aside."""
        batch = batches["forget"]
        pixels = _pixels(batch).detach().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            logits = forward(_with(batch, pixels))
        shift = torch.randint(1, logits.shape[-1], batch.labels.shape)  # the engine's stream
        other = (batch.labels + shift.to(batch.labels.device)) % logits.shape[-1]
        own, others = (self._squared(logits, labels, pixels) for labels in (batch.labels, other))
        logged = {"own_sensitivity": own, "other_sensitivity": others}
        return ObjectiveValue(own - self.other_weight * others, logged)

    def _squared(self, logits: Tensor, labels: Tensor, pixels: Tensor) -> Tensor:
        chosen = logits.gather(-1, labels.unsqueeze(-1)).sum()
        (gradient,) = torch.autograd.grad(chosen, [pixels], create_graph=True)
        return gradient.flatten(1).square().sum(1).mean()


@dataclass(frozen=True)
class Smoothness:
    """Mean ||f(x) - f(x + n)|| / ||n|| over samples and noises; see ``JiT``."""

    samples: int
    noise: float
    parts: tuple[str, ...] = ("forget",)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward with a gradient, and one without for each noise."""
        batch = batches["forget"]
        pixels = _pixels(batch)
        logits = wide(forward(batch))
        slopes = []
        for _ in range(self.samples):
            noise = self.noise * torch.randn(pixels.shape, dtype=pixels.dtype)  # engine's stream
            moved = (pixels + noise.to(pixels.device)).clamp(pixels.min(), pixels.max())
            with torch.no_grad():
                other = wide(forward(_with(batch, moved)))
            length = (moved - pixels).flatten(1).norm(dim=1).clamp_min(1e-12)
            slopes.append((logits - other).norm(dim=1) / length)
        slope = torch.stack(slopes).mean()
        return ObjectiveValue(slope, {"slope": slope})
