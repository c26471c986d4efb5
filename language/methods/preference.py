"""Objectives on two answers to each forget question: the true one, and a refusal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_forgetting.common.data.batch import IGNORE, Batch, Forward, Source
from stable_forgetting.common.objectives.objectives import ObjectiveValue, joint_logits
from stable_forgetting.common.objectives.positions import (
    Average,
    average,
    cross_entropy,
    log_likelihood,
    mean_probability,
    sample_cross_entropy,
)
from stable_forgetting.common.objectives.terms import FDivergence, LogLikelihoods, Term


@dataclass(frozen=True)
class RefusalPairs:
    """A term on refusals and true answers, matched by index, and a term on retain data.

    Attributes:
        refusals: The same questions with the preferred answers; fetched by the batch's indices.
        forget_weight: Factor of the term on pairs.
        retain: Term on retain data; None never reads any.
        retain_weight: Its factor.
    """

    refusals: Source
    _: KW_ONLY
    forget_weight: float = 1.0
    retain: Term | None = None
    retain_weight: float = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        """Retain too, where it has a term."""
        return ("forget",) if self.retain is None else ("forget", "retain")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward over answers and refusals where their shapes allow it."""
        answers = batches["forget"]
        refusals = self.refusals.fetch(answers.indices)
        z_answer, z_refusal = joint_logits(forward, [answers, refusals])
        term = self.term(answers, z_answer, refusals, z_refusal)
        total = self.forget_weight * term
        with torch.no_grad():
            logged = {
                "forget_loss": sample_cross_entropy(z_answer, answers.labels).mean(),
                "refusal_loss": sample_cross_entropy(z_refusal, refusals.labels).mean(),
                "forget_term": term,
            }
        if self.retain is not None:
            batch = batches["retain"]
            z = forward(batch)
            retain_term = self.retain(z, batch)
            total = total + self.retain_weight * retain_term
            logged |= {"retain_term": retain_term, "retain_loss": retain_term}
        return ObjectiveValue(total, logged)

    @abstractmethod
    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """A scalar to minimise, of both batches and their logits."""


@dataclass(frozen=True, kw_only=True)
class RefusalPreference(RefusalPairs):
    """-factor mean log sigmoid(beta [log r(refusal) - log r(answer)]), see ``DPO``.

    Attributes:
        answer_reference: Original's log p of the true answers; None: no reference.
        refusal_reference: Original's log p of the refusals.
        imitate: Cross-entropy on the refusal instead of the preference.
        over: How that cross-entropy is averaged.
    """

    answer_reference: LogLikelihoods | None = None
    refusal_reference: LogLikelihoods | None = None
    beta: float = 0.1
    factor: float = 20.0
    imitate: bool = False
    over: Average = "samples"

    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """The preference, or the imitation."""
        if self.imitate:
            loss = cross_entropy(z_refusal, refusals.labels)
            return average(loss, refusals.labels, self.over)
        difference = log_likelihood(z_refusal, refusals.labels) - log_likelihood(
            z_answer, answers.labels
        )
        if self.answer_reference is not None and self.refusal_reference is not None:
            fixed = self.refusal_reference(refusals) - self.answer_reference(answers)
            difference = difference - fixed
        return -self.factor * F.logsigmoid(self.beta * difference).mean()


@dataclass(frozen=True, kw_only=True)
class RefusalDivergence(RefusalPairs):
    """f*(g(P_f)) - g(P_e), P the mean probability of an answer's tokens, see ``FLAT``.

    Attributes:
        divergence: g and f*.
        diluted: Positions of each padded text over which that code takes one mean of the whole
            batch, masked ones counted as 0; None: per answer token and sample.
    """

    divergence: FDivergence
    diluted: int | None = None

    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """Mean over samples."""
        pairs = (z_refusal, refusals.labels), (z_answer, answers.labels)
        preferred, unwanted = (self._probability(z, labels) for z, labels in pairs)
        return self.divergence.loss(preferred, unwanted).mean()

    def _probability(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.diluted is None:
            return mean_probability(logits, labels)
        counted = labels != IGNORE
        probability = (-cross_entropy(logits, labels)).exp() * counted
        return probability.sum() / (len(labels) * self.diluted)
