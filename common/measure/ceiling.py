"""How large a cross-entropy can get where the last normalisation and the head are frozen.

Logits are then z = W (g * x + b) + c with a normalised x of norm at most sqrt(d), whatever the
layers before do; a LayerNorm's x has mean zero besides.  So is the loss bounded: -log p_y is convex
in x and has its largest value on the sphere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

STARTS, ITERATIONS = 8, 200
"""Points to start from, per label, and iterations from each at most."""
PRECISION = 1e-12
"""Nats that an iteration must gain to be followed by another."""


@dataclass(frozen=True)
class LastLayers:
    """A normalisation and the linear head behind it.

    Attributes:
        gain: (d,) g.
        shift: (d,) b.
        weight: (C, d) W.
        bias: (C,) c.
        centred: Whether x has mean zero, as a LayerNorm's has; one by the root mean square has not.
    """

    gain: Tensor
    shift: Tensor
    weight: Tensor
    bias: Tensor
    centred: bool = True


@torch.no_grad()
def cross_entropy_ceilings(
    layers: LastLayers, labels: Iterable[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Largest cross-entropy per label, reached by ascent on the sphere, and a proven bound.

    Each iteration moves to the point of the sphere that the gradient points to, which never lowers
    a convex function.  It starts at the points that favour single other classes most.

    Args:
        labels: L of the C labels; all when None.

    Returns:
        Two times (L,), in nats: the largest value reached, and log sum_j exp of the largest
        z_j - z_y that any x gives, which no x can exceed.
    """
    weight = layers.weight.double()
    scaled = weight * layers.gain.double()
    if layers.centred:
        scaled = scaled - scaled.mean(1, keepdim=True)
    offset = weight @ layers.shift.double() + layers.bias.double()
    radius = weight.shape[1] ** 0.5
    reached, bounds = [], []
    for label in range(len(weight)) if labels is None else labels:
        slopes, offsets = scaled - scaled[label], offset - offset[label]
        norms = slopes.norm(dim=1)
        highest = radius * norms + offsets  # of each z_j - z_y alone
        bounds.append(highest.logsumexp(0))
        first = highest.topk(min(STARTS, len(weight))).indices
        points = radius * slopes[first] / norms[first, None].clamp_min(1e-30)
        logits = points @ slopes.T + offsets
        for _ in range(ITERATIONS):
            before = logits.logsumexp(1)
            gradient = logits.softmax(1) @ slopes
            points = radius * gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-30)
            logits = points @ slopes.T + offsets
            if (logits.logsumexp(1) - before).max() <= PRECISION:
                break
        reached.append(logits.logsumexp(1).max())
    return torch.stack(reached), torch.stack(bounds)
