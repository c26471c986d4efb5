"""Weights that several forwards share while they do not change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class Shared:
    """What the open scopes around one layer share."""

    def __init__(self) -> None:
        self.scopes = 0
        self.lock = threading.Lock()
        self.weights: dict[torch.dtype, Tensor] = {}
        self.factors: list[tuple[int, int | None]] | None = None


OPEN: WeakKeyDictionary[nn.Module, Shared] = WeakKeyDictionary()
LOCK = threading.Lock()


def shared_weight(
    layer: nn.Module,
    factors: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    build: Callable[[torch.dtype], Tensor],
) -> Tensor | None:
    """The layer's effective weight (k, d) in ``dtype``, built on first use; None outside a scope.

    Args:
        layer: Around which a scope may be open.
        factors: A and Bt, which must stay as they are.  (A start is a constant that DDP rewrites.)
        dtype: Of the weight.
        build: dtype -> the weight.

    Raises:
        RuntimeError: The factors changed inside the scope.
    """
    shared = OPEN.get(layer)
    if shared is None:
        return None
    with shared.lock:
        places = [_place(factor) for factor in factors]
        if shared.factors is None:
            shared.factors = places
        elif shared.factors != places:
            raise RuntimeError("A or Bt changed inside reuse_weights; step after the with block")
        if dtype not in shared.weights:
            with torch.inference_mode(False):  # an evaluation may build what a training step saves
                shared.weights[dtype] = build(dtype)
        return shared.weights[dtype]


def _place(tensor: Tensor) -> tuple[int, int | None]:
    """Where a tensor's values are, and how often torch saw them change there."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version
