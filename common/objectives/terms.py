"""Terms of the literature's objectives: what pushes forget away, what holds on to retain.

A loss per position becomes a term per part here; each is called as ``term(logits, batch)`` and
returns a scalar to minimise.  :class:`common.objectives.objectives.ForgetRetain` adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


@dataclass(frozen=True)
class WeightedAscent:
    """-mean of p^confidence (1 - p)^importance CE, the weights without gradient.

    WGA has importance 0 (arXiv 2502.19301); SatImp has both (arXiv 2505.11953).
    """

    confidence: float
    importance: float = 0.0
    over: Average = "tokens"

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Ascent that fades where the position is forgotten already."""
        loss = positions.cross_entropy(logits, batch.labels)
        p = (-loss.detach()).exp()
        weight = p**self.confidence * (1 - p) ** self.importance
        return -positions.average(weight * loss, batch.labels, self.over)


@dataclass(frozen=True)
class Divergence:
    """Mean KL(reference || model) on a batch, or muse_bench's sum over raw logits.

    Attributes:
        reference: Batch -> logits of Original.
        over: How positions are averaged.
        kind: ``kl``, or ``muse``: ``raw_divergence`` summed over positions, averaged over samples.
    """

    reference: Forward
    over: Average = "samples"
    kind: Literal["kl", "muse"] = "kl"

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Zero where the model is the reference."""
        fixed = self.reference(batch)
        if self.kind == "muse":
            return positions.raw_divergence(logits, fixed, batch.labels).sum() / len(batch)
        return positions.average(
            positions.divergence(logits, fixed, batch.labels), batch.labels, self.over
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


@dataclass(frozen=True)
class NegativePreference:
    """NPO: -(2/beta) mean log sigmoid(-beta (log p - log p_ref)), log p summed over positions.

    Its gradient is gradient ascent on -log p (the sum) weighted by
    2 sigmoid(beta (log p - log p_ref)), which is 1 at the start: NPO tends to ascent as beta -> 0.
    Source: arXiv 2404.05868; open-unlearning (trainer/unlearn/npo.py).
    """

    reference: LogLikelihoods
    beta: float = 0.1

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean over samples."""
        ratio = positions.log_likelihood(logits, batch.labels) - self.reference(batch)
        return positions.negative_preference(ratio, self.beta).mean()


@dataclass(frozen=True)
class LogitPreference:
    """Published code's NPO and SimNPO: the preference loss of every single logit, averaged.

    Formula: -(2/beta) mean_{n,t,v} log sigmoid(beta (z_ref - z - gamma)) over scored positions.
    NPO (swj0419/muse_bench) has gamma 0, SimNPO (OPTML-Group/Unlearn-Simple) has z_ref 0.
    """

    reference: Forward | None
    beta: float = 0.1
    gamma: float = 0.0

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean over scored positions and all logits."""
        scored = batch.labels != IGNORE
        difference = wide(logits)[scored] + self.gamma
        if self.reference is not None:
            difference = difference - wide(self.reference(batch))[scored]
        return positions.negative_preference(difference, self.beta).mean()


@dataclass(frozen=True)
class SimplePreference:
    """SimNPO: -(2/beta) mean log sigmoid(beta (NLL / |y| - delta)); needs no reference.

    The paper's margin gamma is beta delta.  Source: arXiv 2410.07163; open-unlearning
    (trainer/unlearn/simnpo.py).
    """

    beta: float = 4.5
    delta: float = 0.0

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean over samples of the length-normalised preference loss."""
        lengths = (batch.labels != IGNORE).reshape(len(batch), -1).sum(1)
        ratio = positions.log_likelihood(logits, batch.labels) / lengths + self.delta
        return positions.negative_preference(ratio, self.beta).mean()


@dataclass(frozen=True)
class SelfDistillation:
    """UNDIAL: cross-entropy from Original's softmax with the label's logit lowered by ``strength``.

    Source: arXiv 2402.10052; open-unlearning (trainer/unlearn/undial.py).

    Attributes:
        reference: Batch -> logits of Original.
        over: How positions are averaged.
        masked: Whether positions without a label are left out.  That code counts them, and takes
            its mark -100 for a place from the vocabulary's end, whose logit is lowered there.
    """

    reference: Forward
    strength: float = 10.0
    over: Average = "tokens"
    masked: bool = True

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean over positions."""
        labels = batch.labels if self.masked else batch.labels.remainder(logits.shape[-1])
        target = positions.lowered(self.reference(batch), labels, self.strength)
        return positions.average(positions.towards(logits, target, labels), labels, self.over)


@dataclass(frozen=True)
class WithoutTheLabel:
    """CE-U: cross-entropy from the model's own softmax (no gradient) without the label.

    ``skip`` leaves out the first positions of each sequence.  Source: arXiv 2503.01224;
    open-unlearning (trainer/unlearn/ceu.py).
    """

    skip: int = 0
    over: Average = "tokens"

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean over positions."""
        labels = batch.labels
        if self.skip and labels.ndim > 1:
            first = (labels != IGNORE).cumsum(-1) <= self.skip
            labels = labels.masked_fill(first, IGNORE)
        target = positions.lowered(logits.detach(), labels, float("inf"))
        return positions.average(positions.towards(logits, target, labels), labels, self.over)


@dataclass(frozen=True)
class FDivergence:
    """One divergence."""

    gain: Callable[[Tensor], Tensor]
    cost: Callable[[Tensor], Tensor]

    def loss(self, preferred: Tensor, unwanted: Tensor) -> Tensor:
        """f*(g(P_f)) - g(P_e), elementwise; both are probabilities."""
        return self.cost(unwanted) - self.gain(preferred)


def _same(probability: Tensor) -> Tensor:
    return probability


def _half_tanh(probability: Tensor) -> Tensor:
    return torch.tanh(probability) / 2


DIVERGENCES = {
    "tv": FDivergence(_half_tanh, _half_tanh),
    "kl": FDivergence(_same, lambda p: torch.exp(p - 1)),
    "js": FDivergence(
        lambda p: math.log(2) - F.softplus(-p), lambda p: F.softplus(p) - math.log(2)
    ),
    "pearson": FDivergence(_same, lambda p: p.square() / 4 + p),
}
"""Total variation, Kullback-Leibler, Jensen-Shannon and Pearson's chi squared."""
