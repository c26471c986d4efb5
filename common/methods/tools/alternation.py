"""SFR-on's objective: ascent on forget batches, descent on retain batches, in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping

from common.data.batch import Batch, Forward
from common.methods.tools.streams import Interleaved
from common.objectives.objectives import ObjectiveValue
from common.objectives.positions import sample_cross_entropy


class AlternatingAscent:
    """-alpha_t sum_i w_i CE_i on the first loader's batches, CE on all others.

    w_i = CE_i^-lam / sum_j CE_j^-lam carries no gradient: samples that are forgotten already weigh
    less.  alpha_t falls from ``alpha`` to 0 along a cosine over ``batches`` batches.

    Attributes:
        forgetting: Whether the last batch was one of the first loader.
    """

    parts: tuple[str, ...] = ("turns",)

    def __init__(self, turns: Interleaved, batches: int, *, alpha: float, lam: float):
        self.turns, self.batches, self.alpha, self.lam = turns, batches, alpha, lam
        self.forgetting = False

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward on the batch whose turn it is."""
        batch = batches["turns"]
        self.forgetting = self.turns.last_turn == 0
        losses = sample_cross_entropy(forward(batch), batch.labels)
        if not self.forgetting:
            loss = losses.mean()
            return ObjectiveValue(loss, {"retain_loss": loss})
        weights = (losses.detach() + 1e-12).pow(-self.lam)
        weighted = (weights / weights.sum() * losses).sum()
        progress = min(1.0, (self.turns.count - 1) / self.batches)
        alpha = self.alpha * 0.5 * (1 + math.cos(math.pi * progress))
        return ObjectiveValue(-alpha * weighted, {"forget_loss": losses.mean()})
