"""The short-run settings that the baselines of this package share."""

from __future__ import annotations

from typing import Literal

from common.base.numbers import Count, NonNegative, Positive
from common.methods.gradient import AdaptedConfig


class ShortConfig(AdaptedConfig):
    """A short run on a vision transformer, of the whole model or of an adapter.

    AdamW with weight decay 0.05, lr 1e-4 and a cosine are what the SFRon repository uses for
    fine-tuning, random labels, SalUn, SCRUB and Bad Teacher on a Swin-T (there: one epoch, batches
    of 128).  Sweep lr from 1e-5 to 1e-3; small models from scratch want more.
    """

    steps: Count | None = None
    epochs: Count | None = 3
    batch_size: Count = 64
    lr: Positive = 1e-4
    weight_decay: NonNegative = 0.05
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
