"""The families of causal models, one row each: all that is asked of an architecture.

A new family is one :class:`CausalFamily` in :data:`FAMILIES`.  No torch here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.config import did_you_mean, read_yaml
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.adapters import base_of, is_adapter

LONGEST_ROW = 1024
"""Tokens of a packed row that no model of the table sees only in part."""

Fields = Mapping[str, Any]


def _windowed_row(config: Any) -> int:
    """A mask of one's own takes the place of a sliding window: no row may be longer than that."""
    return min(LONGEST_ROW, getattr(config, "sliding_window", None) or LONGEST_ROW)


_COMPONENTS = {
    "mlp": ("mlp",),
    "attention": ("attn", "attention", "self_attn"),
    "head": ("lm_head", "embed_out"),
}
"""Component -> parts of dotted parameter names that tell it."""
_QKV = ("*self_attn.q_proj", "*self_attn.k_proj", "*self_attn.v_proj")


@dataclass(frozen=True)
class CausalFamily:
    """One architecture.

    Attributes:
        model_type: Its name in transformers.
        mlp: Patterns of the module names of its MLPs' linear layers; where a row has none, they are
            read from the model (:mod:`language.models.sizes`).
        attention: The same of its attention.
        layers: Patterns of all linear layers of its blocks, where they were read.
        head: Patterns of the parameter names of the output layer.
        linear_head: Logits are one linear map of the decoder's last hidden state, nothing more.
        last_norm: Name in the decoder of the normalisation before the head; empty if not known.
        maskable: It takes a whole attention mask (N, 1, T, T) and explicit positions.
        longest_row: Its transformers config -> tokens of the longest packed row treated exactly.
        tied: The head is the embedding matrix.
        tiny: (width, blocks, attention heads) -> config fields of a tiny model, if there is one.
    """

    model_type: str
    mlp: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    head: tuple[str, ...] = ("lm_head.*", "embed_out.*")
    linear_head: bool = False
    last_norm: str = ""
    maskable: bool = False
    longest_row: Callable[[Any], int] = _windowed_row
    tied: bool = False
    tiny: Callable[[int, int, int], Fields] | None = None

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Adapter patterns by placement, for placements that there are."""
        both = (*self.mlp, *self.attention) if self.mlp and self.attention else ()
        placements = {"mlp": self.mlp, "attention": self.attention, "all": both}
        return {name: patterns for name, patterns in placements.items() if patterns}

    def component_of(self, parameter: str) -> str:
        """``mlp``, ``attention``, ``head`` or ``other``, from a parameter's dotted name."""
        for part in parameter.split("."):
            for component, names in _COMPONENTS.items():
                if part in names:
                    return component
        return "other"


def _llama_tiny(dim: int, depth: int, heads: int) -> Fields:
    width = -(-dim // 3) * 8  # 8/3 of the width, as in LLaMA, rounded up to a multiple of 8
    return {**_blocks(dim, depth, heads), "intermediate_size": width}


def _mistral_tiny(dim: int, depth: int, heads: int) -> Fields:
    return {**_llama_tiny(dim, depth, heads), "num_key_value_heads": heads}


def _blocks(dim: int, depth: int, heads: int) -> Fields:
    return {"hidden_size": dim, "num_hidden_layers": depth, "num_attention_heads": heads}


def _gpt_neo_tiny(dim: int, depth: int, heads: int) -> Fields:
    dropout = dict.fromkeys(("attention_dropout", "embed_dropout", "resid_dropout"), 0.0)
    kinds = [[["global"], depth]]
    sizes = {"hidden_size": dim, "num_layers": depth, "num_heads": heads}
    return {**sizes, "attention_types": kinds, **dropout}


def _phi_tiny(dim: int, depth: int, heads: int) -> Fields:
    return {**_blocks(dim, depth, heads), "intermediate_size": 4 * dim}


def _gpt_neo_row(config: Any) -> int:
    """Local layers see a window of row positions, whatever positions and mask are given."""
    local = "local" in config.attention_layers
    return config.window_size if local else config.max_position_embeddings


_EXACT: dict[str, Any] = {"linear_head": True, "maskable": True}

FAMILIES: dict[str, CausalFamily] = {
    family.model_type: family
    for family in (
        CausalFamily(
            "gpt_neo",
            mlp=("*mlp.c_fc", "*mlp.c_proj"),
            attention=tuple(f"*attn.attention.{name}_proj" for name in ("q", "k", "v", "out")),
            **_EXACT,
            last_norm="ln_f",
            longest_row=_gpt_neo_row,
            tied=True,
            tiny=_gpt_neo_tiny,
        ),
        CausalFamily(
            "phi",
            mlp=("*mlp.fc1", "*mlp.fc2"),
            attention=(*_QKV, "*self_attn.dense"),
            **_EXACT,
            last_norm="final_layernorm",
            tiny=_phi_tiny,
        ),
        CausalFamily(
            "llama",
            mlp=tuple(f"*mlp.{name}_proj" for name in ("gate", "up", "down")),
            attention=(*_QKV, "*self_attn.o_proj"),
            **_EXACT,
            last_norm="norm",
            tiny=_llama_tiny,
        ),
        CausalFamily(
            "mistral",
            **_EXACT,
            last_norm="norm",
            tiny=_mistral_tiny,
        ),
        CausalFamily("qwen2", **_EXACT, last_norm="norm"),
        CausalFamily("gemma", last_norm="norm"),
        CausalFamily("gemma3_text", last_norm="norm"),
        CausalFamily("gpt_neox", **_EXACT, last_norm="final_layer_norm"),
        CausalFamily("phi3", linear_head=True),
        CausalFamily("qwen3", linear_head=True),
        CausalFamily("gpt2", linear_head=True),
    )
}
"""``model_type`` of transformers -> family."""


def family_of(model_type: str | None) -> CausalFamily:
    """The family of a model type; one without patterns and promises where the table has no row."""
    return FAMILIES.get(model_type or "") or CausalFamily(model_type or "unknown")


def context_of(model: Any) -> int:
    """Tokens that a model reads at once, as its config says."""
    config = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def tiny_family(kind: str) -> CausalFamily:
    """The family of a tiny model.

    Raises:
        ConfigError: The table has no tiny model of this kind.
    """
    kinds = [name for name, family in FAMILIES.items() if family.tiny is not None]
    if kind not in kinds:
        raise ConfigError(f"model.kind {kind}: no tiny model{did_you_mean(kind, kinds)}")
    return FAMILIES[kind]


_KNOWN: Mapping[str, Any] = read_yaml(Path(__file__).with_name("published.yaml"))
PUBLISHED: Mapping[str, tuple[str, Fields]] = {
    name: (model_type, row["sizes"])
    for model_type, models in _KNOWN.items()
    for name, row in models.items()
}
"""Short name, such as ``phi-1.5`` -> model type and sizes of the published models that can be
counted without a network: fields of a transformers config, never used to run a model."""
_SIZE_OF: dict[str, str] = {
    hub_id: name
    for models in _KNOWN.values()
    for name, row in models.items()
    for hub_id in row["ids"]
}
"""Hub id of a checkpoint -> short name."""


def published_sizes(hub_id: str) -> tuple[str, Fields] | None:
    """(model type, config fields) of a hub id; None where its sizes are not in the table.

    The folder of an adapter stands for the model that it is for.
    """
    hub_id = base_of(Path(hub_id)) if is_adapter(hub_id) else hub_id
    return PUBLISHED[_SIZE_OF[hub_id]] if hub_id in _SIZE_OF else None
