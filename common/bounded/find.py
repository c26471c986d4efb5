"""Finds the bounded layers of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from common.bounded.layer import BoundedLinear


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, BoundedLinear]]:
    """(name, layer) of every adapted layer."""
    for name, module in model.named_modules():
        if isinstance(module, BoundedLinear):
            yield name, module
