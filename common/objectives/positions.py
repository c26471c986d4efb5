"""Losses of single positions, and how they are averaged.

Like :mod:`common.objectives.objectives` these know logits and labels alone: logits are (N, C) or
(N, T, C), labels (N,) or (N, T) with -100 where a position does not count. Each loss has the shape
of the labels, is zero where they are ignored, and is computed in float32 or wider without a copy
that is larger than the logits.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_forgetting.common.data.batch import IGNORE

Average = Literal["samples", "tokens"]


def _at(z: Tensor, index: Tensor) -> Tensor:
    return z.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _counted(values: Tensor, labels: Tensor) -> Tensor:
    return torch.where(labels == IGNORE, torch.zeros_like(values), values)


def average(values: Tensor, labels: Tensor, over: Average) -> Tensor:
    """The mean of a loss, a scalar.

    Args:
        values: The labels' shape, zero where ignored.
        labels: (N,) or (N, T).
        over: ``samples``: the mean over samples of each sample's mean over its positions (the
            TOFU paper's definition).  ``tokens``: the mean over all positions of the batch (what
            published code does), in which long answers weigh more.
    """
    if over == "tokens" or labels.ndim == 1:
        counted = (labels != IGNORE).to(values.dtype)
        return (values * counted).sum() / counted.sum().clamp_min(1)
    return _per_sample(values, labels).mean()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p_y, the labels' shape."""
    flat = wide(logits).reshape(-1, logits.shape[-1])
    losses = F.cross_entropy(flat, labels.reshape(-1), reduction="none", ignore_index=IGNORE)
    return losses.view(labels.shape)


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) log p(y | x): the SUM of log p over a sample's positions."""
    return -cross_entropy(logits, labels).reshape(len(labels), -1).sum(1)


def inverted_hinge(logits: Tensor, labels: Tensor) -> Tensor:
    """IHL: 1 + p_y - max_{v != y} p_v, in [0, 2]; the rival v* is the runner-up of the two largest.

    Its gradient by the logits is p_y (1 - p_y + p_v*) at y, -p_v* (1 + p_y - p_v*) at v* and
    p_v (p_v* - p_y) elsewhere: bounded by 1/2, summing to zero, vanishing as p_y -> 0.
    Source: LoKU, arXiv 2408.06621, eq. of the inverted hinge loss.
    """
    z = wide(logits)
    target = labels.clamp_min(0)
    first, second = z.detach().topk(2, dim=-1).indices.unbind(-1)
    rival = torch.where(first == target, second, first)
    total = z.logsumexp(-1)
    return _counted(1 + (_at(z, target) - total).exp() - (_at(z, rival) - total).exp(), labels)


def divergence_from_uniform(logits: Tensor, labels: Tensor, floor: float = 0.0) -> Tensor:
    """KL(U || p) = -log V - (1/V) sum_v log p_v; zero exactly at the uniform distribution.

    Args:
        logits: (..., V).
        labels: Where it counts.
        floor: Added to p inside the logarithm (1e-12 in the published code).

    Source: maximising entropy, arXiv 2410.08109, and its repository (trainer/losses.py).
    """
    z = wide(logits)
    size = math.log(z.shape[-1])
    if floor:
        return _counted(-size - (z.softmax(-1) + floor).log().mean(-1), labels)
    return _counted(z.logsumexp(-1) - z.mean(-1) - size, labels)


def divergence(logits: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """KL(reference || model) per position; both are logits (..., V)."""
    model, fixed = wide(logits).log_softmax(-1), wide(reference).log_softmax(-1)
    return _counted((fixed.exp() * (fixed - model)).sum(-1), labels)


def raw_divergence(logits: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """sum_v exp(z_ref) (z_ref - z) on logits as they are: what muse_bench calls KL; it is none."""
    model, fixed = wide(logits), wide(reference)
    return _counted((fixed.exp() * (fixed - model)).sum(-1), labels)


def towards(logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy from the soft targets softmax(target_logits), per position."""
    target = wide(target_logits).softmax(-1)
    return _counted(-(target * wide(logits).log_softmax(-1)).sum(-1), labels)


def lowered(logits: Tensor, labels: Tensor, amount: float) -> Tensor:
    """The logits with the label's one lowered by ``amount`` (or to -inf); ignored ones as is."""
    target = labels.clamp_min(0).unsqueeze(-1)
    own = wide(logits).gather(-1, target)
    changed = torch.where(labels.unsqueeze(-1) == IGNORE, own, own - amount)
    return wide(logits).scatter(-1, target, changed)


def negative_preference(log_ratio: Tensor, beta: float) -> Tensor:
    """-(2 / beta) log sigmoid(-beta log_ratio), any shape; its slope at 0 is 1 for every beta."""
    return -(2 / beta) * F.logsigmoid(-beta * log_ratio)


def mean_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) mean over a sample's positions of p_y: the probability, not its logarithm."""
    probability = (-cross_entropy(logits, labels)).exp()
    return _per_sample(_counted(probability, labels), labels)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """z_y - logsumexp_{c != y} z_c = log p_y - log(1 - p_y), per position, in float32 or wider.

    Args:
        logits: (..., C).
        labels: (...), -100 gives 0.
    """
    logits = wide(logits)
    target = labels.clamp_min(0).unsqueeze(-1)
    own = logits.gather(-1, target).squeeze(-1)
    others = logits.scatter(-1, target, float("-inf")).logsumexp(-1)
    return torch.where(labels == IGNORE, torch.zeros_like(own), own - others)


def wide(logits: Tensor) -> Tensor:
    """The logits in float32 or wider."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def _per_sample(values: Tensor, labels: Tensor) -> Tensor:
    """(N,) means over the positions that count."""
    if labels.ndim == 1:
        return values
    counted = (labels != IGNORE).to(values.dtype)
    dims = tuple(range(1, labels.ndim))
    return (values * counted).sum(dims) / counted.sum(dims).clamp_min(1)


def sample_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) cross-entropy -log p_y per sample."""
    return _per_sample(cross_entropy(logits, labels), labels)


def unlikelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """-log(1 - p_y) as softplus of the margin, the labels' shape.

    Saturates: its gradient vanishes as p_y -> 0, unlike that of ascent on cross-entropy.
    Source: unlikelihood training, arXiv 1908.04319.
    """
    return F.softplus(margins(logits, labels)) * (labels != IGNORE)


def sample_distillation(logits: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """(N,) KL(target || softmax(logits)): summed over classes, a mean over counted positions.

    The mean over samples is left to the caller.  A mean over classes too (the default of torch's
    ``kl_div``, as in the Bad Teacher and SSD repositories) makes the loss C times smaller.

    Args:
        logits: Of the student, (N, C) or (N, T, C).
        target: Probabilities of the same shape.
        labels: (N,) or (N, T); positions with -100 do not count.
    """
    log_student = F.log_softmax(wide(logits), dim=-1)
    values = (torch.xlogy(target, target) - target * log_student).sum(-1)
    return _per_sample(values * (labels != IGNORE), labels)
