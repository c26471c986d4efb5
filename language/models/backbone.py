"""A causal language model taken apart: the decoder that makes hidden states, and the head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from language.models.families import LINEAR_HEADS, LONGEST_ROW, MASKABLE, MASKABLE_ATTENTION


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
    if kind not in LINEAR_HEADS or not isinstance(model.get_output_embeddings(), nn.Linear):
        return None
    return Backbone(model.base_model, model.get_output_embeddings())


def row_limit(model: Any) -> int | None:
    """Tokens of the longest packed row that the model treats exactly, or None if it takes none.

    GPT-Neo's local layers see a window of *row* positions, whatever positions and mask are given:
    within one window of tokens nothing is lost.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in MASKABLE:
        return None
    if config._attn_implementation not in MASKABLE_ATTENTION:
        return None
    if config.model_type == "gpt_neo":
        local = "local" in config.attention_layers
        return config.window_size if local else config.max_position_embeddings
    return LONGEST_ROW


def hidden_states(parts: Backbone, inputs: dict[str, Tensor]) -> Tensor:
    """(N, T, D) last hidden states."""
    return parts.decoder(**inputs, use_cache=False).last_hidden_state


def device_of(model: nn.Module) -> torch.device:
    """Where inputs go."""
    return next(model.parameters()).device
