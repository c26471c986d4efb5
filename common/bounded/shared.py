"""Weights that several forwards share while they do not change."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from common.bounded.layer import BoundedLinear


class _Shared:
    """What the open scopes around one layer share."""

    def __init__(self) -> None:
        self.scopes = 0
        self.lock = threading.Lock()
        self.weights: dict[torch.dtype, Tensor] = {}
        self.factors: list[tuple[int, int | None]] | None = None


_OPEN: WeakKeyDictionary[nn.Module, _Shared] = WeakKeyDictionary()
_LOCK = threading.Lock()


def shared_weight(layer: BoundedLinear, dtype: torch.dtype) -> Tensor | None:
    """The layer's effective weight (k, d) in ``dtype``, built on first use; None outside a scope.

    Raises:
        RuntimeError: The factors changed inside the scope.
    """
    shared = _OPEN.get(layer)
    if shared is None:
        return None
    with shared.lock:
        factors = [_place(layer.A), _place(layer.Bt)]  # a start is a constant that DDP rewrites
        if shared.factors is None:
            shared.factors = factors
        elif shared.factors != factors:
            raise RuntimeError("A or Bt changed inside reuse_weights; step after the with block")
        if dtype not in shared.weights:
            with torch.inference_mode(False):  # an evaluation may build what a training step saves
                shared.weights[dtype] = layer.effective_weight(dtype)
        return shared.weights[dtype]


def _place(tensor: Tensor) -> tuple[int, int | None]:
    """Where a tensor's values are, and how often torch saw them change there."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version
