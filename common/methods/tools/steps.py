"""Objectives whose gradient is taken elsewhere, projected, or weighed by a multiplier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.objectives.objectives import ForgetRetain, ObjectiveValue
from stable_forgetting.common.objectives.positions import (
    Average,
    average,
    cross_entropy,
    sample_cross_entropy,
    wide,
)
from stable_forgetting.common.train.telemetry import LOOKED_AT

TINY = 1e-12


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, without those that a probe only looks at."""
    return [p for p in model.parameters() if p.requires_grad and id(p) not in LOOKED_AT]


def gradients(
    loss: Tensor, parameters: Sequence[nn.Parameter], *, more: bool = False
) -> list[Tensor]:
    """One tensor per parameter; zeros where nothing flows.  ``more`` of the graph will follow."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=more)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """<a, b> over all tensors."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def off(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """What of a does not oppose b: a - min(0, <a, b>) b / ||b||^2."""
    share = inner(a, b).clamp_max(0) / (inner(b, b) + TINY)
    return [x - share * y for x, y in zip(a, b, strict=True)]


@contextmanager
def moved(
    parameters: Sequence[nn.Parameter], direction: Sequence[Tensor], length: float
) -> Iterator[None]:
    """While open, the parameters lie ``length`` further along a direction."""
    start = [parameter.detach().clone() for parameter in parameters]
    norm = torch.stack([tensor.square().sum() for tensor in direction]).sum().sqrt()
    with torch.no_grad():
        for parameter, tensor in zip(parameters, direction, strict=True):
            parameter.add_(tensor * (length / (norm + TINY)))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, tensor in zip(parameters, start, strict=True):
                parameter.copy_(tensor)


def with_gradient(
    value: Tensor, parameters: Sequence[nn.Parameter], gradient: Sequence[Tensor]
) -> Tensor:
    """A scalar of this value whose gradient by the parameters is the given one."""
    linear = inner(parameters, gradient)
    return value.detach() + linear - linear.detach()


@dataclass(frozen=True)
class AroundTerms:
    """What takes the gradients of two terms in a way of its own."""

    model: nn.Module
    objective: ForgetRetain

    @property
    def parts(self) -> tuple[str, ...]:
        """Those of the objective."""
        return self.objective.parts

    def and_retain(
        self, forget: ObjectiveValue, forward: Forward, batches: Mapping[str, Batch]
    ) -> ObjectiveValue:
        """The value of the forget term, and the retain term in a forward of its own."""
        batch, term = batches["retain"], self.objective.retain
        assert term is not None
        retain = term(forward(batch), batch)
        logged = {**forget.parts, "retain_term": retain, "retain_loss": retain}
        return ObjectiveValue(forget.total + self.objective.retain_weight * retain, logged)


@dataclass(frozen=True)
class Sharpness(AroundTerms):
    """The forget term at the worst weights within ``rho``, the retain term at the weights."""

    moves_weights: ClassVar[bool] = True
    rho: float

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Two forwards of the forget batch, one of the retain batch."""
        forget, parameters = replace(self.objective, retain=None), trained(self.model)
        first = gradients(forget(forward, batches).total, parameters)
        with moved(parameters, first, self.rho):
            worst = forget(forward, batches)
            gradient = gradients(worst.total, parameters)
        total = with_gradient(worst.total, parameters, gradient)
        return self.and_retain(ObjectiveValue(total, worst.parts), forward, batches)


@dataclass(frozen=True)
class AscentFirst:
    """Cross-entropy on retain, at the weights one step of ascent on forget away."""

    moves_weights: ClassVar[bool] = True
    model: nn.Module
    rho: float
    over: Average = "samples"
    parts: tuple[str, ...] = ("forget", "retain")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """A forward of each batch, at two places."""
        parameters = trained(self.model)
        forget = self._loss(forward, batches["forget"])
        with moved(parameters, gradients(forget, parameters), self.rho):
            retain = self._loss(forward, batches["retain"])
            gradient = gradients(retain, parameters)
        total = with_gradient(retain, parameters, gradient)
        return ObjectiveValue(total, {"forget_loss": forget, "retain_loss": retain})

    def _loss(self, forward: Forward, batch: Batch) -> Tensor:
        return average(cross_entropy(forward(batch), batch.labels), batch.labels, self.over)


class Multiplier:
    """A multiplier of a constraint: rises while that is broken, and is never negative.

    Called after each optimizer step; it then rises by the mean over the step's micro-batches.
    """

    def __init__(self, value: float, rate: float):
        self.value, self.rate = torch.tensor(value, dtype=torch.float64), rate
        self.violations: list[Tensor] = []

    def __float__(self) -> float:
        return float(self.value)

    def note(self, violation: Tensor) -> None:
        """Keeps what a micro-batch says of the constraint."""
        self.violations.append(violation.detach().double().cpu())

    def __call__(self, model: nn.Module) -> None:
        """One step of dual ascent."""
        violation = torch.stack(self.violations).mean()
        self.value = (self.value + self.rate * violation).clamp_min(0)
        self.violations = []

    def state(self) -> dict[str, Tensor]:
        """Its value, and what was noted since it last rose."""
        noted = torch.stack([torch.zeros_like(self.value), *self.violations])
        return {"value": self.value.clone(), "noted": noted}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.value, self.violations = state["value"].clone(), [*state["noted"][1:].clone()]


@dataclass(frozen=True)
class PrimalDual:
    """w_f forget + lambda (retain - level), lambda raised after every optimizer step."""

    objective: ForgetRetain
    level: float
    multiplier: Multiplier

    @property
    def parts(self) -> tuple[str, ...]:
        """Those of the objective."""
        return self.objective.parts

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward; the multiplier notes by how much the constraint is broken."""
        weight = float(self.multiplier)
        value = replace(self.objective, retain_weight=weight)(forward, batches)
        self.multiplier.note(value.parts["retain_term"] - self.level)
        dual = value.total.new_tensor(weight)
        return ObjectiveValue(value.total - weight * self.level, {**value.parts, "dual": dual})


@dataclass
class Entangled:
    """Ascent on forget under a bound on the retain loss; later off the retain gradient."""

    model: nn.Module
    slack: float
    rho: float
    multiplier: Multiplier
    first: int
    reference: Forward
    drift: float
    parts: tuple[str, ...] = ("forget", "retain")
    level: Tensor = field(default_factory=lambda: torch.tensor(torch.nan, dtype=torch.float64))
    steps: int = 0

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """The bounded ascent; once ``first`` optimizer steps are done, projected."""
        batch, forget = batches["retain"], batches["forget"]
        z = forward(batch)
        retain = sample_cross_entropy(z, batch.labels).mean()
        gone = sample_cross_entropy(forward(forget), forget.labels).mean()
        if self.level.isnan():
            self.level = retain.detach().double().cpu()
        violation = retain - float(self.level) - self.slack
        total = -gone + float(self.multiplier) * violation
        total = total + 0.5 * self.rho * violation.clamp_min(0).square()
        self.multiplier.note(violation)
        logged = {"forget_loss": gone, "retain_loss": retain}
        if self.steps < self.first:
            return ObjectiveValue(total, logged)
        return ObjectiveValue(self._projected(total, retain + self._away(z, batch)), logged)

    def after_step(self, model: nn.Module) -> None:
        """Counts an optimizer step, after which the multiplier rises."""
        self.steps += 1
        self.multiplier(model)

    def _away(self, z: Tensor, batch: Batch) -> Tensor:
        """Drift of the softmax from Original's."""
        distance = wide(z).softmax(-1) - wide(self.reference(batch)).softmax(-1)
        return self.drift * average(distance.square().sum(-1), batch.labels, "samples")

    def _projected(self, total: Tensor, kept: Tensor) -> Tensor:
        """The total with a gradient that does not raise ``kept``."""
        parameters = trained(self.model)
        held = gradients(kept, parameters, more=True)
        return with_gradient(total, parameters, off(gradients(total, parameters), held))

    def state(self) -> dict[str, Tensor]:
        """Step, level and multiplier."""
        steps = torch.tensor(self.steps)
        return {"steps": steps, "level": self.level.clone(), **self.multiplier.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.steps, self.level = int(state["steps"]), state["level"].clone()
        self.multiplier.load_state(state)


@dataclass(frozen=True)
class Invariant:
    """Cross-entropy plus the IRM penalty, the squared slope by a factor on the logits."""

    weight: float
    over: Average = "samples"

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """The slope at factor 1 is the mean of sum_v p_v z_v - z_y."""
        z, labels = wide(logits), batch.labels
        own = z.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        slope = average((z.softmax(-1) * z).sum(-1) - own, labels, self.over)
        loss = average(cross_entropy(z, labels), labels, self.over)
        return loss + self.weight * slope.square()


def logit_spread(logits: Tensor, labels: Tensor) -> Tensor:
    """(max_v z_v - mean_v z_v)^2, the labels' shape: zero where every answer is as likely."""
    z = wide(logits)
    return (z.max(-1).values - z.mean(-1)).square()


def less_certain(logits: Tensor, labels: Tensor, offset: float, entropy_weight: float) -> Tensor:
    """-log(1 + offset - p_y) - w H(p), the labels' shape: bounded, as p_y <= 1 < 1 + offset."""
    log_p = wide(logits).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    own = (-cross_entropy(logits, labels)).exp()
    return -(1 + offset - own).log() - entropy_weight * entropy
