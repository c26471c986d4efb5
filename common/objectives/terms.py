"""Terms of the literature's objectives: what pushes forget away, what holds on to retain.

A loss per position becomes a term per part here; each is called as ``term(logits, batch)`` and
returns a scalar to minimise.  :class:`common.objectives.objectives.ForgetRetain` adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_forgetting.common.data.batch import IGNORE, Batch, Forward
from stable_forgetting.common.objectives import positions
from stable_forgetting.common.objectives.positions import Average, wide

PositionLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) -> losses of the labels' shape."""
ForgetLoss = Literal["cross_entropy", "unlikelihood"]


class Term(Protocol):
    """One part's share of a loss, as a function of its logits."""

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """A scalar to minimise."""


@dataclass(frozen=True)
class Mean:
    """``sign`` times the mean of a position loss: -1 ascends."""

    loss: PositionLoss
    over: Average = "samples"
    sign: float = 1.0

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean over samples or tokens."""
        return self.sign * positions.average(
            self.loss(logits, batch.labels), batch.labels, self.over
        )


def pushed_away(kind: ForgetLoss, over: Average = "samples") -> Mean:
    """The forget term of gradient ascent, ``-CE``, or the saturating ``mean -log(1 - p_y)``."""
    if kind == "unlikelihood":
        return Mean(positions.unlikelihood, over)
    return Mean(positions.cross_entropy, over, sign=-1.0)


def weighted_ascent(confidence: float, importance: float = 0.0, over: Average = "tokens") -> Mean:
    """-mean of p^confidence (1 - p)^importance CE, the weights without gradient.

    It fades where a position is forgotten already.  WGA has importance 0 (arXiv 2502.19301); SatImp
    has both (arXiv 2505.11953).
    """

    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        loss = positions.cross_entropy(logits, labels)
        p = (-loss.detach()).exp()
        return p**confidence * (1 - p) ** importance * loss

    return Mean(weighted, over, sign=-1.0)


def divergence_from(reference: Forward, over: Average = "samples") -> Term:
    """Mean KL(reference || model) on a batch, ``reference`` being batch -> logits of Original."""

    def term(logits: Tensor, batch: Batch) -> Tensor:
        values = positions.divergence(logits, reference(batch), batch.labels)
        return positions.average(values, batch.labels, over)

    return term


def raw_divergence_from(reference: Forward) -> Term:
    """muse_bench's: :func:`raw_divergence` summed over positions, averaged over samples."""
    return lambda logits, batch: (
        positions.raw_divergence(logits, reference(batch), batch.labels).sum() / len(batch)
    )


@dataclass(frozen=True)
class LogLikelihoods:
    """log p(y | x) of Original for an index set, looked up by a batch's indices.

    Attributes:
        indices: (M,) int64, ascending.
        values: (M,), sums over positions, in nats.
    """

    indices: Tensor
    values: Tensor

    def __call__(self, batch: Batch) -> Tensor:
        """(N,) values of the batch's samples, on its labels' device."""
        place = torch.searchsorted(self.indices, batch.indices)
        assert torch.equal(self.indices[place.clamp_max(len(self.indices) - 1)], batch.indices)
        return self.values[place].to(batch.labels.device)


def preference_against(reference: LogLikelihoods, beta: float = 0.1) -> Term:
    """NPO: -(2/beta) mean log sigmoid(-beta (log p - log p_ref)), log p summed over positions.

    Its gradient is gradient ascent on -log p (the sum) weighted by
    2 sigmoid(beta (log p - log p_ref)), which is 1 at the start: NPO tends to ascent as beta -> 0.
    Source: arXiv 2404.05868; open-unlearning (trainer/unlearn/npo.py).
    """

    def term(logits: Tensor, batch: Batch) -> Tensor:
        ratio = positions.log_likelihood(logits, batch.labels) - reference(batch)
        return positions.negative_preference(ratio, beta).mean()

    return term


def token_preference(
    reference: Forward, beta: float = 4.0, alpha: float = 0.0, over: Average = "tokens"
) -> Term:
    """TNPO: NPO's loss of every position, -(2/beta) log sigmoid(-beta log(p / p_ref)), averaged.

    WTNPO multiplies it by p^alpha without gradient.  Source: arXiv 2502.19301.
    """

    def term(logits: Tensor, batch: Batch) -> Tensor:
        loss = positions.cross_entropy(logits, batch.labels)
        ratio = positions.cross_entropy(reference(batch), batch.labels) - loss
        weight = (-alpha * loss.detach()).exp()
        values = weight * positions.negative_preference(ratio, beta)
        return positions.average(values, batch.labels, over)

    return term


def logit_preference(reference: Forward | None, beta: float = 0.1, gamma: float = 0.0) -> Term:
    """Published code's NPO and SimNPO: the preference loss of every single logit, averaged.

    Formula: -(2/beta) mean_{n,t,v} log sigmoid(beta (z_ref - z - gamma)) over scored positions.
    NPO (swj0419/muse_bench) has gamma 0, SimNPO (OPTML-Group/Unlearn-Simple) has z_ref 0.
    """

    def term(logits: Tensor, batch: Batch) -> Tensor:
        scored = batch.labels != IGNORE
        difference = wide(logits)[scored] + gamma
        if reference is not None:
            difference = difference - wide(reference(batch))[scored]
        return positions.negative_preference(difference, beta).mean()

    return term


def simple_preference(beta: float = 4.5, delta: float = 0.0) -> Term:
    """SimNPO: -(2/beta) mean log sigmoid(beta (NLL / |y| - delta)); needs no reference.

    The paper's margin gamma is beta delta.  Source: arXiv 2410.07163; open-unlearning
    (trainer/unlearn/simnpo.py).
    """

    def term(logits: Tensor, batch: Batch) -> Tensor:
        lengths = (batch.labels != IGNORE).reshape(len(batch), -1).sum(1).clamp_min(1)
        ratio = positions.log_likelihood(logits, batch.labels) / lengths + delta
        return positions.negative_preference(ratio, beta).mean()

    return term


def self_distillation(
    reference: Forward, strength: float = 10.0, over: Average = "tokens", masked: bool = True
) -> Term:
    """UNDIAL: cross-entropy from Original's softmax with the label's logit lowered by ``strength``.

    Not ``masked``, positions without a label count too, as in that code, which takes its mark -100
    for a place from the vocabulary's end and lowers the logit there.
    Source: arXiv 2402.10052; open-unlearning (trainer/unlearn/undial.py).
    """

    def term(logits: Tensor, batch: Batch) -> Tensor:
        labels = batch.labels if masked else batch.labels.remainder(logits.shape[-1])
        target = positions.lowered(reference(batch), labels, strength)
        return positions.average(positions.towards(logits, target, labels), labels, over)

    return term


def without_the_label(skip: int = 0, over: Average = "tokens") -> Term:
    """CE-U: cross-entropy from the model's own softmax (no gradient) without the label.

    ``skip`` leaves out the first positions of each sequence.  Source: arXiv 2503.01224;
    open-unlearning (trainer/unlearn/ceu.py).
    """

    def term(logits: Tensor, batch: Batch) -> Tensor:
        labels = batch.labels
        if skip and labels.ndim > 1:
            first = (labels != IGNORE).cumsum(-1) <= skip
            labels = labels.masked_fill(first, IGNORE)
        target = positions.lowered(logits.detach(), labels, float("inf"))
        return positions.average(positions.towards(logits, target, labels), labels, over)

    return term


def _f_divergence(
    gain: Callable[[Tensor], Tensor], cost: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda preferred, unwanted: cost(unwanted) - gain(preferred)


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tv": _f_divergence(lambda p: torch.tanh(p) / 2, lambda p: torch.tanh(p) / 2),
    "kl": _f_divergence(lambda p: p, lambda p: torch.exp(p - 1)),
    "js": _f_divergence(
        lambda p: math.log(2) - F.softplus(-p), lambda p: F.softplus(p) - math.log(2)
    ),
    "pearson": _f_divergence(lambda p: p, lambda p: p.square() / 4 + p),
}
"""Total variation, Kullback-Leibler, Jensen-Shannon and Pearson's chi squared: probabilities of
preferred answers P_e and of unwanted ones P_f -> f*(g(P_f)) - g(P_e), elementwise."""
