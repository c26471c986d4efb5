"""An explicit scope in which every effective weight is built once.

Building W0 + dW costs as much as some hundred tokens.  Where several forward passes meet the same
factors (micro-batches of one optimizer step, an evaluation), :func:`reuse_weights` pays that once,
for one k x d matrix per adapted layer as long as the scope lasts.

Nothing is keyed on tensor versions: fused AdamW and ``p.data.copy_()`` do not raise them, so a
cache that trusts them goes stale unseen.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from common.bounded_layer import BoundedLinear


class _Shared:
    """What the open scopes around one layer share."""

    def __init__(self) -> None:
        self.scopes = 0
        self.lock = threading.Lock()
        self.weights: dict[torch.dtype, Tensor] = {}
        self.factors: list[tuple[int, int | None]] | None = None


_OPEN: WeakKeyDictionary[nn.Module, _Shared] = WeakKeyDictionary()
_LOCK = threading.Lock()


@contextlib.contextmanager
def reuse_weights(model: nn.Module) -> Iterator[None]:
    """Builds the effective weight of each adapted layer once inside the ``with`` block.

    A and Bt must not change between the first forward pass inside and the end of the block: step
    the optimizer after the last forward pass.  (Other tensors in their place raise, and so does a
    change that torch counts; one that it does not count, such as fused AdamW's, would go unseen.)
    The shared weights are dropped when the outermost block around a layer ends, also on an
    exception.  Threads that open a scope on one model share its weights.  A graph made inside can
    be differentiated after the block, and holds its weight until then; with gradient checkpointing,
    differentiate inside.

    Args:
        model: Any module; without adapted layers nothing happens.
    """
    from common.bounded_layer import adapted_layers

    layers = [layer for _, layer in adapted_layers(model)]
    with _LOCK:
        for layer in layers:
            _OPEN.setdefault(layer, _Shared()).scopes += 1
    try:
        yield
    finally:
        with _LOCK:
            for layer in layers:
                _OPEN[layer].scopes -= 1
                if not _OPEN[layer].scopes:
                    del _OPEN[layer]


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
