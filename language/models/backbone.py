"""A causal language model taken apart: the decoder that makes hidden states, and the head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from language.models.families import family_of

MASKABLE_ATTENTION = ("eager", "sdpa")
"""Attention implementations of transformers that take a whole mask."""


class Backbone(NamedTuple):
    """``head(decoder(...).last_hidden_state)`` are the model's logits."""

    decoder: nn.Module
    head: nn.Module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a data-parallel wrapper, or itself."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def backbone(model: Any) -> Backbone | None:
    """Decoder and head, or None where the head is more than a linear map (or is not known)."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not family_of(kind).linear_head:
        return None
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        return None
    return Backbone(model.base_model, model.get_output_embeddings())


def row_limit(model: Any) -> int | None:
    """Tokens of the longest packed row that the model treats exactly, or None if it takes none."""
    config: Any = getattr(model, "config", None)
    family = family_of(getattr(config, "model_type", None))
    if not family.maskable or config._attn_implementation not in MASKABLE_ATTENTION:
        return None
    return family.longest_row(config)


def hidden_states(parts: Backbone, inputs: dict[str, Tensor]) -> Tensor:
    """(N, T, D) last hidden states."""
    return parts.decoder(**inputs, use_cache=False).last_hidden_state


def device_of(model: nn.Module) -> torch.device:
    """Where inputs go."""
    return next(model.parameters()).device
