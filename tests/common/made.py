"""What tests of losses and gradients make: values, and a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def values_of(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Normal values in float64."""
    stream = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=stream, dtype=torch.float64)


def loss_of(model, batch) -> torch.Tensor:
    """Cross-entropy of a model on what a batch calls x."""
    return F.cross_entropy(model(batch.inputs["x"]), batch.labels)
