"""Causal models in numbers, in closed form: GPT-Neo, Phi, LLaMA and Mistral, published or tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stable_forgetting.common.protocol.sizes import Shape, Sizes, linear_parameters
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.models.families import published_sizes, tiny_family

HEAD = "lm_head"


def sizes_of(config: CausalModelConfig, vocab_size: int | None = None) -> Sizes | None:
    """Sizes of a model; None where neither the tables nor the config tell them.

    Args:
        config: Which model.
        vocab_size: Of a tiny model, where it is not the size of the tokenizer to train.
    """
    published = published_sizes(config.name)
    if published is not None:
        return causal_sizes(*published)
    entries = vocab_size or config.tokenizer
    if config.name != "tiny" or not isinstance(entries, int):
        return None
    assert config.kind and config.dim and config.depth and config.heads
    family = tiny_family(config.kind)
    assert family.tiny is not None
    fields = family.tiny(config.dim, config.depth, config.heads)
    own = {"vocab_size": entries, "tie_word_embeddings": True}
    own["max_position_embeddings"] = config.context or 0
    return causal_sizes(family.model_type, {**fields, **own})


def model_type_of(config: CausalModelConfig) -> str:
    """``model_type`` of a model that the tables know, else empty."""
    published = published_sizes(config.name)
    return config.kind or "" if published is None else published[0]


def causal_sizes(model_type: str, fields: Mapping[str, Any]) -> Sizes | None:
    """Sizes by the fields of a transformers config; None for other architectures."""
    formula = FORMULAS.get(model_type)
    return None if formula is None else formula(fields)


def _gpt_neo(fields: Mapping[str, Any]) -> Sizes:
    width, depth = fields["hidden_size"], fields["num_layers"]
    inner, entries = 4 * width, fields.get("vocab_size", 50257)
    linear: dict[str, Shape] = {}
    for block in (f"transformer.h.{i}" for i in range(depth)):
        linear |= {f"{block}.attn.attention.{n}_proj": (width, width) for n in "kvq"}
        linear[f"{block}.attn.attention.out_proj"] = (width, width)
        linear |= {f"{block}.mlp.c_fc": (inner, width), f"{block}.mlp.c_proj": (width, inner)}
    biases = depth * (width + inner + width)  # those of q, k and v are absent
    embeddings = width * (entries + fields.get("max_position_embeddings", 2048))
    norms = 2 * width * (2 * depth + 1)
    count = linear_parameters(linear, bias=False) + biases + embeddings + norms
    return Sizes(count, {**linear, HEAD: (entries, width)}, width, depth, entries)


def _phi(fields: Mapping[str, Any]) -> Sizes:
    width, depth = fields["hidden_size"], fields["num_hidden_layers"]
    inner, entries = fields["intermediate_size"], fields["vocab_size"]
    linear: dict[str, Shape] = {}
    for block in (f"model.layers.{i}" for i in range(depth)):
        linear |= {f"{block}.self_attn.{n}_proj": (width, width) for n in "qkv"}
        linear[f"{block}.self_attn.dense"] = (width, width)
        linear |= {f"{block}.mlp.fc1": (inner, width), f"{block}.mlp.fc2": (width, inner)}
    tables = 1 if fields.get("tie_word_embeddings") else 2
    rest = tables * entries * width + entries + 2 * width * (depth + 1)
    count = linear_parameters(linear, bias=True) + rest
    return Sizes(count, {**linear, HEAD: (entries, width)}, width, depth, entries)


def _llama(fields: Mapping[str, Any]) -> Sizes:
    width, depth = fields["hidden_size"], fields["num_hidden_layers"]
    inner, entries = fields["intermediate_size"], fields["vocab_size"]
    heads = fields["num_attention_heads"]
    narrow = width // heads * fields.get("num_key_value_heads", heads)
    linear: dict[str, Shape] = {}
    for block in (f"model.layers.{i}" for i in range(depth)):
        outputs = {"q": width, "k": narrow, "v": narrow, "o": width}
        linear |= {f"{block}.self_attn.{n}_proj": (k, width) for n, k in outputs.items()}
        linear |= {f"{block}.mlp.{n}_proj": (inner, width) for n in ("gate", "up")}
        linear[f"{block}.mlp.down_proj"] = (width, inner)
    tables = 1 if fields.get("tie_word_embeddings") else 2
    rest = tables * entries * width + width * (2 * depth + 1)
    count = linear_parameters(linear, bias=False) + rest
    return Sizes(count, {**linear, HEAD: (entries, width)}, width, depth, entries)


FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], Sizes]] = {
    "gpt_neo": _gpt_neo,
    "phi": _phi,
    "llama": _llama,
    "mistral": _llama,
}
"""``model_type`` of transformers -> closed form."""
