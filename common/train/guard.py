"""The divergence guard: losses and weights that leave the finite numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class DivergenceGuard:
    """Remembers at which step a loss first was not finite or above a cap.

    Args:
        cap: Largest absolute value of a loss.
        device: Where the losses lie; nothing waits for it.
        runs: K where K runs advance together, each with a guard of its own; None for one run.

    Attributes:
        first_bad: int64, () or (K,): the step, counted from 1; -1 where no loss was bad.
    """

    def __init__(self, cap: float, device: torch.device, runs: int | None = None):
        self.cap = cap
        self.first_bad = torch.full(() if runs is None else (runs,), -1, device=device)

    def watch(self, step: int, losses: Tensor) -> None:
        """Looks at the losses, (n,) or (n, K), of a step counted from 1."""
        fine = losses.isfinite().all(0) & (losses.abs() <= self.cap).all(0)
        self.first_bad = torch.where(~fine & (self.first_bad < 0), step, self.first_bad)


def first_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor that holds an infinity or a NaN."""
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), None)
