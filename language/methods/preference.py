"""DPO's objective: two answers to each forget question, one preferred."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.data.batch import Batch, Forward, Source
from common.objectives.objectives import ObjectiveValue, joint_logits
from common.objectives.positions import (
    Average,
    average,
    cross_entropy,
    log_likelihood,
    sample_cross_entropy,
)
from common.objectives.terms import LogLikelihoods, Term


@dataclass(frozen=True, kw_only=True)
class _Weights:
    beta: float = 0.1
    factor: float = 20.0
    imitate: bool = False
    over: Average = "samples"
    forget_weight: float = 1.0
    retain: Term | None = None
    retain_weight: float = 0.0


@dataclass(frozen=True)
class RefusalPreference(_Weights):
    """-factor mean log sigmoid(beta [log r(refusal) - log r(answer)]), see ``DPO``.

    Attributes:
        refusals: The same questions with the preferred answers; fetched by the batch's indices.
        answer_reference: Original's log p of the true answers; None: no reference.
        refusal_reference: Original's log p of the refusals.
        imitate: Cross-entropy on the refusal instead of the preference.
        over: How that cross-entropy is averaged.
    """

    refusals: Source
    answer_reference: LogLikelihoods | None = None
    refusal_reference: LogLikelihoods | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Retain too, where it has a term."""
        return ("forget",) if self.retain is None else ("forget", "retain")

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward over answers and refusals where their shapes allow it."""
        answers = batches["forget"]
        refusals = self.refusals.fetch(answers.indices)
        z_answer, z_refusal = joint_logits(forward, [answers, refusals])
        term, logged = self._term(answers, z_answer, refusals, z_refusal)
        total = self.forget_weight * term
        logged |= {"forget_term": term}
        if self.retain is not None:
            batch = batches["retain"]
            z = forward(batch)
            retain_term = self.retain(z, batch)
            total = total + self.retain_weight * retain_term
            logged |= {"retain_term": retain_term, "retain_loss": retain_term}
        return ObjectiveValue(total, logged)

    def _term(
        self, answers: Batch, z_answer: Tensor, refusals: Batch, z_refusal: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            logged = {
                "forget_loss": sample_cross_entropy(z_answer, answers.labels).mean(),
                "refusal_loss": sample_cross_entropy(z_refusal, refusals.labels).mean(),
            }
        if self.imitate:
            loss = cross_entropy(z_refusal, refusals.labels)
            return average(loss, refusals.labels, self.over), logged
        difference = log_likelihood(z_refusal, refusals.labels) - log_likelihood(
            z_answer, answers.labels
        )
        if self.answer_reference is not None and self.refusal_reference is not None:
            fixed = self.refusal_reference(refusals) - self.answer_reference(answers)
            difference = difference - fixed
        return -self.factor * F.logsigmoid(self.beta * difference).mean(), logged
