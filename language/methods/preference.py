"""Objectives on two answers to each forget question: the true one, and a refusal."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
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
    wide,
)
from stable_forgetting.common.objectives.terms import LogLikelihoods, Term

LOG_2 = math.log(2)


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
class AgainstMean(RefusalPreference):
    """-factor mean log sigmoid(k - beta log r(answer)), k the mean log r(refusal), see ``KTO``."""

    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """The refusals carry no gradient."""
        assert self.answer_reference is not None and self.refusal_reference is not None
        moved = log_likelihood(z_refusal.detach(), refusals.labels)
        level = (moved - self.refusal_reference(refusals)).mean()
        ratio = log_likelihood(z_answer, answers.labels) - self.answer_reference(answers)
        return -self.factor * F.logsigmoid(level - self.beta * ratio).mean()


@dataclass(frozen=True, kw_only=True)
class AscentAndMismatch(RefusalPairs):
    """-w_f CE(true answer) + w_m CE(other answer), see ``LLMU``."""

    ascent_weight: float = 0.5
    mismatch_weight: float = 1.0
    over: Average = "samples"

    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """Both cross-entropies."""
        pairs = (z_answer, answers.labels), (z_refusal, refusals.labels)
        own, other = (average(cross_entropy(z, y), y, self.over) for z, y in pairs)
        return self.mismatch_weight * other - self.ascent_weight * own


@dataclass(frozen=True, kw_only=True)
class RefusalDivergence(RefusalPairs):
    """f*(g(P_f)) - g(P_e), P the mean probability of an answer's tokens, see ``FLAT``.

    Attributes:
        divergence: (P_e, P_f) -> the divergence, elementwise.
        diluted: Positions of each padded text over which that code takes one mean of the whole
            batch, masked ones counted as 0; None: per answer token and sample.
    """

    divergence: Callable[[Tensor, Tensor], Tensor]
    diluted: int | None = None

    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """Mean over samples."""
        pairs = (z_refusal, refusals.labels), (z_answer, answers.labels)
        preferred, unwanted = (self._probability(z, labels) for z, labels in pairs)
        return self.divergence(preferred, unwanted).mean()

    def _probability(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.diluted is None:
            return mean_probability(logits, labels)
        counted = labels != IGNORE
        probability = (-cross_entropy(logits, labels)).exp() * counted
        return probability.sum() / (len(labels) * self.diluted)


@dataclass(frozen=True, kw_only=True)
class MeanPreference(RefusalPairs):
    """-(2/beta) mean log sigmoid(beta [mean log p(refusal) - mean log p(answer)] - gamma)."""

    beta: float = 2.5
    gamma: float = 0.5

    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """The preference, see ``SimDPO``."""
        answer = sample_cross_entropy(z_answer, answers.labels)
        difference = answer - sample_cross_entropy(z_refusal, refusals.labels)
        return -(2 / self.beta) * F.logsigmoid(self.beta * difference - self.gamma).mean()


def cycled(refusals: Tensor, answers: Tensor) -> Tensor:
    """(N, A) the refusals' labels over the answers' positions, repeated where they are shorter."""
    counts = (refusals != IGNORE).sum(1, keepdim=True).clamp_min(1)
    places = torch.arange(answers.shape[1], device=answers.device).expand_as(answers) % counts
    return torch.where(answers == IGNORE, IGNORE, refusals.gather(1, places))


def divergence_from_token(logits: Tensor, labels: Tensor) -> Tensor:
    """JS(p || one-hot of the label) per position, in nats: at most log 2.

    With p_t that of the label: [(1 - p_t) log 2 + p_t log(2 p_t / (1 + p_t)) + log(2 / (1 + p_t))]
    / 2.
    """
    log_p = -cross_entropy(logits, labels)
    p, more = log_p.exp(), log_p.exp().log1p()
    value = (1 - p) * LOG_2 + p * (LOG_2 + log_p - more) + LOG_2 - more
    return torch.where(labels == IGNORE, 0.0, value / 2)


@dataclass(frozen=True)
class JensenShannon:
    """Mean JS(p_theta || p_reference) on a batch."""

    reference: Forward
    over: Average = "tokens"

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Zero where the model is the reference."""
        ours, theirs = wide(logits).log_softmax(-1), wide(self.reference(batch)).log_softmax(-1)
        middle = torch.logaddexp(ours, theirs) - LOG_2
        value = sum((log.exp() * (log - middle)).sum(-1) for log in (ours, theirs)) / 2
        counted = torch.where(batch.labels == IGNORE, 0.0, value)
        return average(counted, batch.labels, self.over)


@dataclass(frozen=True, kw_only=True)
class RefusalTokens(RefusalPairs):
    """Mean JS(p_theta || a refusal's token) over the answer's positions, see ``JensUn``."""

    over: Average = "tokens"

    def term(self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor) -> Tensor:
        """The logits are those behind the true answer."""
        labels = cycled(refusals.labels, answers.labels)
        return average(divergence_from_token(z_answer, labels), labels, self.over)
