"""Pure losses on logits and labels, and the objectives made of them.

Nothing here knows a modality: logits are (N, C) or (N, T, C), labels (N,) or (N, T) with -100
where a position does not count; a sample's loss is the mean over its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from common.data.batch import Batch, Forward, concatenate
from common.objectives.positions import sample_cross_entropy, sample_unlikelihood

ForgetLoss = Literal["cross_entropy", "unlikelihood"]


@dataclass(frozen=True)
class Terms:
    """What an objective returns: the scalar to minimise and its named parts (detached later)."""

    total: Tensor
    parts: Mapping[str, Tensor]


class Objective(Protocol):
    """Sees only logits of named batches."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the batches that it reads."""

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> Terms:
        """Minimise ``total``; log every entry of ``parts``."""


def joint_logits(forward: Forward, batches: Sequence[Batch]) -> list[Tensor]:
    """Logits of several batches from ONE forward where their shapes allow it.

    Texts of different padded lengths run one after the other.  Padding them to the longer would
    save the bounded layer one build, some 330 tokens on a CPU, and cost three products on 6 to 12 %
    more slots of every layer (TOFU's forget and retain batches; a third more for answers beside
    refusals): from 8 texts a batch on, nothing is left of it.
    """
    shapes = {tuple((k, v.shape[1:]) for k, v in batch.inputs.items()) for batch in batches}
    if len(shapes) > 1:
        return [forward(batch) for batch in batches]
    logits = forward(concatenate(batches))
    return list(logits.split([len(batch) for batch in batches]))


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy on one part: training, Retrain, fine-tuning."""

    part: str = "retain"

    @property
    def parts(self) -> tuple[str, ...]:
        """The one part."""
        return (self.part,)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> Terms:
        """Descends on cross-entropy."""
        batch = batches[self.part]
        loss = sample_cross_entropy(forward(batch), batch.labels).mean()
        return Terms(loss, {f"{self.part}_loss": loss})


@dataclass(frozen=True)
class Forgetting:
    """Forgetting without retain data: ascent on cross-entropy, or the saturating loss.

    Formula: minimise ``-CE(B_f)`` (gradient ascent) or ``mean -log(1 - p_y)`` on B_f.
    """

    forget_loss: ForgetLoss = "cross_entropy"
    parts: tuple[str, ...] = ("forget",)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> Terms:
        """Pushes the forget batch away from its labels."""
        batch = batches["forget"]
        push, loss = forget_terms(forward(batch), batch.labels, self.forget_loss)
        return Terms(push, {"forget_loss": loss})


def forget_terms(logits: Tensor, labels: Tensor, kind: ForgetLoss) -> tuple[Tensor, Tensor]:
    """(term to minimise, cross-entropy to log) on forget data."""
    if kind == "unlikelihood":
        with torch.no_grad():
            loss = sample_cross_entropy(logits, labels).mean()
        return sample_unlikelihood(logits, labels).mean(), loss
    loss = sample_cross_entropy(logits, labels).mean()
    return -loss, loss


@dataclass(frozen=True)
class GradientDifference:
    """Descend on retain, push away on forget.

    Formula: minimise ``w_r CE(B_r) + w_f forget_term(B_f)``.  With w_r = 1, w_f = lambda this is
    the weighted reading of the paper's objective; with w_r = alpha_r, w_f = alpha_f under SGD of
    rate 1 it is its update rule literally (eq. "gradient difference").
    """

    retain_weight: float = 1.0
    forget_weight: float = 0.1
    forget_loss: ForgetLoss = "cross_entropy"
    parts: tuple[str, ...] = ("retain", "forget")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> Terms:
        """One forward over both batches."""
        retain, forget = batches["retain"], batches["forget"]
        retain_logits, forget_logits = joint_logits(forward, [retain, forget])
        kept = sample_cross_entropy(retain_logits, retain.labels).mean()
        push, loss = forget_terms(forget_logits, forget.labels, self.forget_loss)
        total = self.retain_weight * kept + self.forget_weight * push
        return Terms(total, {"retain_loss": kept, "forget_loss": loss})


class Term(Protocol):
    """One part's share of a loss, as a function of its logits."""

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """A scalar to minimise."""


@dataclass(frozen=True)
class ForgetRetain:
    """A term on the forget batch and, where given, one on the retain batch.

    Formula: minimise ``w_f forget(B_f) + w_r retain(B_r)``; the two share one forward where their
    shapes allow it.

    Attributes:
        forget: Term on forget data.
        retain: Term on retain data; None never reads any.
        views: Part -> what a batch is turned into before its forward (see
            :func:`common.data.capabilities.every_position`).
    """

    forget: Term
    retain: Term | None = None
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    views: Mapping[str, Callable[[Batch], Batch]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """Retain too, where it has a term."""
        return ("forget",) if self.retain is None else ("forget", "retain")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> Terms:
        """Logs each part's cross-entropy where its own labels are scored, and each term."""
        read = [self.views.get(part, _as_it_is)(batches[part]) for part in self.parts]
        logits = joint_logits(forward, read)
        logged: dict[str, Tensor] = {}
        terms = []
        for part, term, batch, z in zip(
            self.parts, (self.forget, self.retain), read, logits, strict=False
        ):
            assert term is not None
            terms.append(term(z, batch))
            logged[f"{part}_term"] = terms[-1]
            if part not in self.views:
                with torch.no_grad():
                    logged[f"{part}_loss"] = sample_cross_entropy(z, batch.labels).mean()
        total = self.forget_weight * terms[0]
        for kept in terms[1:]:
            total = total + self.retain_weight * kept
        return Terms(total, logged)


def _as_it_is(batch: Batch) -> Batch:
    return batch
