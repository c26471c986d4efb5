"""f-divergences between two kinds of answer, in their variational form.

The divergence of preferred from unwanted answers is at least ``g(P_e) - f*(g(P_f))``, where P is
the probability that a model gives to a kind; training raises that bound.  Source: FLAT, arXiv
2410.11143, table 1, and its repository (dataloader.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class FDivergence:
    """One divergence.

    Attributes:
        gain: g, of the probability of preferred answers.
        cost: f*(g(.)), of the probability of unwanted ones.
    """

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
