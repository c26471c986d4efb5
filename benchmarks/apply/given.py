"""A model that is given in memory: where it lies, and how it is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def left_as_it_is(model: Any) -> Iterator[None]:
    """A model in memory is measured in eval mode; its modes and its device are put back."""
    if not hasattr(model, "modules"):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    place = place_of(model)
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        if place_of(model) != place:
            model.to(place)


def place_of(model: Any) -> str:
    """Where a model lies; ``auto`` for one that is still to be read."""
    first = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    return "auto" if first is None else str(first.device)
