"""Objectives of two gradients: a rule turns forget's and retain's before they are added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stable_forgetting.common.data.batch import IGNORE, Batch, Forward
from stable_forgetting.common.methods.tools.steps import (
    TINY,
    AroundTerms,
    gradients,
    inner,
    off,
    trained,
    with_gradient,
)
from stable_forgetting.common.objectives.objectives import ObjectiveValue
from stable_forgetting.common.objectives.positions import cross_entropy, sample_cross_entropy, wide

Vector = list[Tensor]
"""One tensor per trained parameter."""
Rule = Callable[[Vector, Vector, Tensor], tuple[Vector, Vector]]
"""(forget's gradient, retain's gradient, retain's loss) -> both as they are added."""
TOLERANCE = 1e-6
"""Share of the largest singular value from which a direction counts."""


def scaled(factor: Tensor | float, vector: Sequence[Tensor]) -> Vector:
    """factor * vector."""
    return [factor * tensor for tensor in vector]


def to_random_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of labels that are drawn anew at each call, the labels' shape."""
    drawn = torch.randint(logits.shape[-1], labels.shape).to(labels.device)  # the engine's stream
    return cross_entropy(logits, torch.where(labels == IGNORE, IGNORE, drawn))


class TwoGradients(AroundTerms):
    """w_f u + w_r k, the gradients of a forget and of a retain term after some change."""

    def added(self, forget: Tensor, retain: Tensor, ours: Vector, kept: Vector) -> Tensor:
        """A scalar of the terms' weighted sum, with the weighted sum of the gradients."""
        w_f, w_r = self.objective.forget_weight, self.objective.retain_weight
        step = [w_f * u + w_r * k for u, k in zip(ours, kept, strict=True)]
        return with_gradient(w_f * forget + w_r * retain, trained(self.model), step)


@dataclass(frozen=True)
class ByRule(TwoGradients):
    """The same, with a rule that sees both gradients and the retain loss."""

    rule: Rule

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward, two gradients."""
        parameters = trained(self.model)
        value = self.objective(forward, batches)
        forget, retain = value.parts["forget_term"], value.parts["retain_term"]
        ours = gradients(forget, parameters, more=True)
        ours, kept = self.rule(ours, gradients(retain, parameters), retain.detach())
        return ObjectiveValue(self.added(forget, retain, ours, kept), value.parts)


@dataclass(frozen=True)
class Orthogonal(TwoGradients):
    """Forget's gradient orthogonal to that of every retained sample, and the samples' mean."""

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Two forwards, and a gradient per retained sample."""
        parameters, gone, batch = trained(self.model), batches["forget"], batches["retain"]
        forget = self.objective.forget(forward(gone), gone)
        ours = gradients(forget, parameters)
        losses = sample_cross_entropy(forward(batch), batch.labels)
        each = [gradients(loss, parameters, more=True) for loss in losses]
        samples = [torch.stack(tensors) for tensors in zip(*each, strict=True)]
        ours = [orthogonal_to(k, u) for k, u in zip(samples, ours, strict=True)]
        total = self.added(forget, losses.mean(), ours, [k.mean(0) for k in samples])
        return ObjectiveValue(total, {"forget_term": forget, "retain_loss": losses.mean()})


def orthogonal_to(directions: Tensor, vector: Tensor) -> Tensor:
    """The vector without what lies in the span of the directions.

    Args:
        directions: (K, ...), which may depend on one another or be zero.
    """
    q, r = torch.linalg.qr(wide(directions).reshape(len(directions), -1).mT)
    u, s, _ = torch.linalg.svd(r, full_matrices=False)
    basis = q @ u[:, s > TOLERANCE * s[0]]
    flat = wide(vector).flatten()
    rest: Tensor = flat - basis @ (basis.mT @ flat)
    return rest.view_as(vector).to(vector.dtype)


def normalised(ours: Vector, kept: Vector, loss: Tensor) -> tuple[Vector, Vector]:
    """Both at length one."""
    lengths = [inner(g, g).sqrt() + TINY for g in (ours, kept)]
    return scaled(1 / lengths[0], ours), scaled(1 / lengths[1], kept)


def bargained(ours: Vector, kept: Vector, loss: Tensor) -> tuple[Vector, Vector]:
    """Both at length 1 / sqrt(1 + cos) of their angle."""
    ours, kept = normalised(ours, kept, loss)
    factor = (1 + inner(ours, kept)).clamp_min(TOLERANCE).rsqrt()
    return scaled(factor, ours), scaled(factor, kept)


class Smoothed:
    """Forget's gradient off a moving average of retain's."""

    def __init__(self, rate: float):
        self.rate = rate
        self.mean: Vector = []

    def __call__(self, ours: Vector, kept: Vector, loss: Tensor) -> tuple[Vector, Vector]:
        """One step of the average, which starts at zero, then the projection."""
        before = self.mean or [torch.zeros_like(k) for k in kept]
        pairs = zip(kept, before, strict=True)
        self.mean = [self.rate * k + (1 - self.rate) * b.to(k) for k, b in pairs]
        return off(ours, self.mean), kept

    def state(self) -> dict[str, Tensor]:
        """The average."""
        return {str(place): tensor.clone() for place, tensor in enumerate(self.mean)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.mean = [state[str(place)].clone() for place in range(len(state))]


class Adjusted:
    """Each off the other, tensor by tensor; then weighed by how far retain's loss is low.

    The last tensor's forget gradient is also taken off the mean of those earlier ones that oppose
    it, of the last ``size`` batches, once there are as many.
    """

    def __init__(self, size: int, steepness: float, level: float):
        self.size, self.steepness, self.level = size, steepness, level
        self.steps = 0
        self.bank: Vector = []

    def __call__(self, ours: Vector, kept: Vector, loss: Tensor) -> tuple[Vector, Vector]:
        """Rectifies, remembers, weighs."""
        pairs = list(zip(ours, kept, strict=True))
        self.bank = [*self.bank, ours[-1]][-self.size :]
        ours = [off([u], [k])[0] for u, k in pairs]
        kept = [off([k], [u])[0] for u, k in pairs]
        if self.steps >= self.size:
            ours[-1] = self._remembering(ours[-1])
        self.steps += 1
        share = torch.sigmoid(self.steepness * (self.level - loss))
        return scaled(share, ours), scaled(1 - share, kept)

    def _remembering(self, last: Tensor) -> Tensor:
        """The gradient off the mean of those earlier ones that oppose it."""
        earlier = torch.stack([tensor.to(last) for tensor in self.bank])
        opposed = (earlier * last).reshape(len(earlier), -1).sum(1) < 0
        mean = (earlier * opposed.view(-1, *(1,) * last.ndim)).sum(0) / opposed.sum().clamp_min(1)
        return off([last], [mean])[0]

    def state(self) -> dict[str, Tensor]:
        """Steps and earlier gradients."""
        bank = {f"bank-{place}": tensor.clone() for place, tensor in enumerate(self.bank)}
        return {"steps": torch.tensor(self.steps), **bank}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.steps = int(state["steps"])
        self.bank = [state[f"bank-{place}"].clone() for place in range(len(state) - 1)]
