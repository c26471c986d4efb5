"""An explicit scope in which every effective weight is built once.

Building W0 + dW costs as much as some hundred tokens.  Where several forward passes meet the same
factors (micro-batches of one optimizer step, an evaluation), :func:`reuse_weights` pays that once,
for one k x d matrix per adapted layer as long as the scope lasts.

Nothing is keyed on tensor versions: fused AdamW and ``p.data.copy_()`` do not raise them, so a
cache that trusts them goes stale unseen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.bounded.shared import LOCK, OPEN, Shared


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
    layers = [layer for _, layer in adapted_layers(model)]
    with LOCK:
        for layer in layers:
            OPEN.setdefault(layer, Shared()).scopes += 1
    try:
        yield
    finally:
        with LOCK:
            for layer in layers:
                OPEN[layer].scopes -= 1
                if not OPEN[layer].scopes:
                    del OPEN[layer]
