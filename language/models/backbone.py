"""A causal language model taken apart: the decoder that makes hidden states, and the head.

Logits are computed only where they are asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.measure.ceiling import LastLayers
from stable_forgetting.language.models.families import family_of

MASKABLE_ATTENTION = ("eager", "sdpa")
"""Attention implementations of transformers that take a whole mask."""

CHUNK_ELEMENTS = 2**25
"""Logits (128 MiB in float32) that are held at once."""


class Backbone(NamedTuple):
    """``head(decoder(...).last_hidden_state)`` are the model's logits."""

    decoder: nn.Module
    head: nn.Module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data-parallel wrappers, or itself."""
    inner = getattr(model, "module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def backbone(model: Any) -> Backbone | None:
    """Decoder and head, or None where the head is more than a linear map (or is not known)."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not family_of(kind).linear_head:
        return None
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        return None
    return Backbone(model.base_model, model.get_output_embeddings())


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def cache_input(model: nn.Module, value: Any) -> dict[str, Any]:
    """The key-value cache as an argument; newer versions of transformers call it ``cache``."""
    name = "cache" if "cache" in _parameters(type(model).forward) else "past_key_values"
    return {name: value}


def cache_output(out: Any) -> Any:
    """The key-value cache that a forward returned; None without one, or with recurrent states.

    Those read padding in the mask's place, and rows cannot leave them.
    """
    cache = out.cache if hasattr(out, "cache") else getattr(out, "past_key_values", None)
    layers = getattr(cache, "layers", ())
    return None if any(hasattr(layer, "recurrent_states") for layer in layers) else cache


ROOM = 64
"""Tokens for which a cache has room once it is full."""


def give_room(cache: Any) -> None:
    """Lets a cache write new tokens beside the old ones, instead of copying all at every step.

    Layers of other kinds than plain growing ones stay as they are.
    """
    for layer in getattr(cache, "layers", ()):
        if type(layer).__name__ == "DynamicLayer":
            layer.update = partial(_append, layer, {})


def _append(
    layer: Any, buffers: dict[str, Tensor], keys: Tensor, values: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    for name, new in (("keys", keys), ("values", values)):
        old, buffer = getattr(layer, name), buffers.get(name)
        size = old.shape[-2] + new.shape[-2]
        if buffer is None or buffer.shape[-2] < size:
            buffer = old.new_empty(*old.shape[:-2], size + ROOM, old.shape[-1])
            buffer[..., : old.shape[-2], :] = old
        elif len(buffer) > len(new):  # rows have left
            buffer = buffer[: len(new)]
            buffer[..., : old.shape[-2], :] = old
        buffer[..., old.shape[-2] : size, :] = new
        buffers[name] = buffer
        setattr(layer, name, buffer[..., :size, :])
    return layer.keys, layer.values


def row_limit(model: Any) -> int | None:
    """Tokens of the longest packed row that the model treats exactly, or None if it takes none."""
    config: Any = getattr(model, "config", None)
    family = family_of(getattr(config, "model_type", None))
    if not getattr(model, "packable", True):
        return None
    if not family.maskable or config._attn_implementation not in MASKABLE_ATTENTION:
        return None
    return family.longest_row(config)


def device_of(model: nn.Module) -> torch.device:
    """Where inputs go."""
    return next(model.parameters()).device


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
    inner: Any = unwrapped(model)
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module):
        return _pick(model(**inputs).logits, positions)
    hook = head.register_forward_pre_hook(lambda _, args: (_pick(args[0], positions), *args[1:]))
    with hook:
        logits = model(**inputs, use_cache=False).logits
    assert logits.shape[:2] == positions.shape, "the head did not see the hidden states"
    return logits


def _pick(states: Tensor, positions: Tensor) -> Tensor:
    """(N, L, D) at (N, A) -> (N, A, D)."""
    index = positions.to(states.device).unsqueeze(-1).expand(-1, -1, states.shape[-1])
    return states.gather(1, index)


def last_layers(model: nn.Module) -> LastLayers | None:
    """The decoder's last normalisation and the head.

    A head that is tied to the embedding is one all the same: adapters leave both alone.  None where
    the family names no normalisation, or where logits are more than a linear map of it.
    """
    inner: Any = unwrapped(model)
    config = getattr(inner, "config", None)
    name = family_of(getattr(config, "model_type", None)).last_norm
    head = inner.get_output_embeddings() if name else None
    if not isinstance(head, nn.Linear) or getattr(config, "final_logit_softcapping", None):
        return None
    norm: Any = inner.base_model.get_submodule(name)
    centred = isinstance(norm, nn.LayerNorm)  # the others divide by the root mean square alone
    bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
    with torch.no_grad():  # asked, not read: Gemma's gain is 1 + weight
        shift = norm(torch.zeros_like(norm.weight))
        gain = norm.weight if centred else norm(torch.ones_like(norm.weight))
    return LastLayers(gain, shift, head.weight, bias, centred=centred)
