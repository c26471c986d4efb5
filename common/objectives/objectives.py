"""Objectives: what is minimised over the batches of named parts.

Nothing here knows a modality: logits are (N, C) or (N, T, C), labels (N,) or (N, T) with -100
where a position does not count; a sample's loss is the mean over its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from stable_forgetting.common.data.batch import IGNORE, Batch, Forward, concatenate
from stable_forgetting.common.objectives.positions import (
    Average,
    average,
    cross_entropy,
    sample_cross_entropy,
)
from stable_forgetting.common.objectives.terms import ForgetLoss, Mean, Term, pushed_away


@dataclass(frozen=True)
class ObjectiveValue:
    """What an objective returns: the scalar to minimise and its named parts (detached later)."""

    total: Tensor
    parts: Mapping[str, Tensor]


class Objective(Protocol):
    """Sees only logits of named batches."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the batches that it reads."""

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
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
    over: Average = "samples"

    @property
    def parts(self) -> tuple[str, ...]:
        """The one part."""
        return (self.part,)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Descends on cross-entropy."""
        batch = batches[self.part]
        logits, labels = forward(batch), batch.labels
        if self.over == "tokens":
            loss = average(cross_entropy(logits, labels), labels, "tokens")
        else:
            loss = sample_cross_entropy(logits, labels).mean()
        return ObjectiveValue(loss, {f"{self.part}_loss": loss})


@dataclass(frozen=True)
class PooledCrossEntropy:
    """Cross-entropy averaged over the positions of several parts together: long answers weigh more.

    Formula: (sum over all parts and positions of -log p_y) / (number of positions).
    """

    parts: tuple[str, ...] = ("forget", "retain")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Logs each part's cross-entropy."""
        read = [batches[part] for part in self.parts]
        logits = joint_logits(forward, read)
        pairs = list(zip(logits, read, strict=True))
        total = torch.stack([cross_entropy(z, batch.labels).sum() for z, batch in pairs]).sum()
        count = sum(int((batch.labels != IGNORE).sum()) for batch in read)
        with torch.no_grad():
            logged = {
                f"{part}_loss": sample_cross_entropy(z, batch.labels).mean()
                for part, (z, batch) in zip(self.parts, pairs, strict=True)
            }
        return ObjectiveValue(total / count, logged)


@dataclass(frozen=True)
class ForgetRetain:
    """A term on the forget batch and, where given, one on the retain batch.

    Formula: minimise ``w_f forget(B_f) + w_r retain(B_r)``; the two share one forward where their
    shapes allow it.

    Attributes:
        forget: Term on forget data.
        retain: Term on retain data; None never reads any.
        views: Part -> what a batch is turned into before its forward (see
            :func:`common.data.batch.every_position`).
        order: In which the batches stand in the shared forward.
        log_terms: Log each term beside its part's cross-entropy.
    """

    forget: Term
    retain: Term | None = None
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    views: Mapping[str, Callable[[Batch], Batch]] = field(default_factory=dict)
    order: tuple[str, ...] = ("forget", "retain")
    log_terms: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        """Retain too, where it has a term."""
        return ("forget",) if self.retain is None else self.order

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Logs each part's cross-entropy where its own labels are scored, and each term."""
        read = [
            self.views[part](batches[part]) if part in self.views else batches[part]
            for part in self.parts
        ]
        logits = joint_logits(forward, read)
        logged: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        for part, batch, z in zip(self.parts, read, logits, strict=True):
            term = self.forget if part == "forget" else self.retain
            assert term is not None
            values[part] = term(z, batch)
            if self.log_terms:
                logged[f"{part}_term"] = values[part]
            if part not in self.views:
                logged[f"{part}_loss"] = _loss(term, values[part], z, batch)
        total = self.forget_weight * values["forget"]
        if "retain" in values:
            total = total + self.retain_weight * values["retain"]
        return ObjectiveValue(total, logged)


def gradient_difference(
    retain_weight: float = 1.0,
    forget_weight: float = 0.1,
    forget_loss: ForgetLoss = "cross_entropy",
    over: Average = "samples",
) -> ForgetRetain:
    """Descend on retain, push away on forget.

    Formula: minimise ``w_r CE(B_r) + w_f forget_term(B_f)``.  With w_r = 1, w_f = lambda this is
    the weighted reading of the paper's objective; with w_r = alpha_r, w_f = alpha_f under SGD of
    rate 1 it is its update rule literally (eq. "gradient difference").
    """
    return ForgetRetain(
        pushed_away(forget_loss, over),
        Mean(cross_entropy, over),
        forget_weight,
        retain_weight,
        order=("retain", "forget"),
        log_terms=False,
    )


def _loss(term: Term, value: Tensor, logits: Tensor, batch: Batch) -> Tensor:
    """A batch's cross-entropy without a graph; taken from the term where that is the same."""
    if isinstance(term, Mean) and term.loss is cross_entropy and term.over == "samples":
        return (term.sign * value).detach()
    with torch.no_grad():
        return sample_cross_entropy(logits, batch.labels).mean()
