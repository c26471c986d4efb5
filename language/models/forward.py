"""Forward passes that compute logits only where they are asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from common.data.batch import Batch


def causal_forward(model: nn.Module, batch: Batch) -> Tensor:
    """Logits at the label positions only: the (N, L, V) logits of a whole text never exist.

    The model runs its own forward; a hook on its head hands on only the hidden states at
    ``positions``, so whatever a model does to its logits afterwards still happens, and wrappers
    (DDP, FSDP) see their usual call.  A model without a known head gives all logits, of which
    those at ``positions`` are taken.

    Args:
        model: A causal language model, possibly wrapped.
        batch: Inputs ``input_ids``, ``attention_mask`` (N, L) and ``positions`` (N, A).

    Returns:
        (N, A, V), aligned with the batch's labels.
    """
    positions = batch.inputs["positions"]
    inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    head = _head_of(model)
    if head is None:
        return _pick(model(**inputs).logits, positions)
    handle = head.register_forward_pre_hook(lambda _, args: (_pick(args[0], positions), *args[1:]))
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        handle.remove()
    assert logits.shape[:2] == positions.shape, "the head did not see the hidden states"
    return logits


def _pick(states: Tensor, positions: Tensor) -> Tensor:
    """(N, L, D) at (N, A) -> (N, A, D)."""
    index = positions.to(states.device).unsqueeze(-1).expand(-1, -1, states.shape[-1])
    return states.gather(1, index)


def _head_of(model: nn.Module) -> nn.Module | None:
    """The output layer of a causal model, looking through wrappers."""
    inner: Any = model
    while not hasattr(inner, "get_output_embeddings") and isinstance(
        getattr(inner, "module", None), nn.Module
    ):
        inner = inner.module
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None
