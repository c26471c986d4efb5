"""The families of causal models, one row each: all that is asked of an architecture.

A new family is one :class:`CausalFamily` in :data:`FAMILIES`.  No torch here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.base.config import did_you_mean
from common.base.errors import ConfigError

LONGEST_ROW = 1024
"""Tokens of a packed row that no model of the table sees only in part."""

Fields = Mapping[str, Any]
_COMPONENTS = {
    "mlp": ("mlp",),
    "attention": ("attn", "attention", "self_attn"),
    "head": ("lm_head", "embed_out"),
}
_GATED = ("*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj")
_QKV = ("*self_attn.q_proj", "*self_attn.k_proj", "*self_attn.v_proj")


@dataclass(frozen=True)
class Published:
    """A published model whose sizes are known, so that counting needs no network.

    Attributes:
        name: Short name, such as ``phi-1.5``.
        ids: Hub ids of checkpoints of this size.
        sizes: Fields of its transformers config; never used to run it.
    """

    name: str
    ids: tuple[str, ...]
    sizes: Fields


@dataclass(frozen=True)
class CausalFamily:
    """One architecture.

    Attributes:
        model_type: Its name in transformers.
        mlp: Patterns of the module names of its MLPs' linear layers.
        attention: The same of its attention.
        head: Patterns of the parameter names of the output layer.
        components: Component -> parts of dotted parameter names that tell it.
        transposed: Its layers are stored transposed (Conv1D), which adapters do not support.
        linear_head: Logits are one linear map of the decoder's last hidden state, nothing more.
        maskable: It takes a whole attention mask (N, 1, T, T) and explicit positions.
        longest_row: Its transformers config -> tokens of the longest packed row treated exactly.
        tied: The head is the embedding matrix.
        tiny: (width, blocks, attention heads) -> config fields of a tiny model, if there is one.
        published: Models of known sizes.
    """

    model_type: str
    mlp: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    head: tuple[str, ...] = ("lm_head.*", "embed_out.*")
    components: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _COMPONENTS)
    transposed: bool = False
    linear_head: bool = False
    maskable: bool = False
    longest_row: Callable[[Any], int] = lambda _: LONGEST_ROW
    tied: bool = False
    tiny: Callable[[int, int, int], Fields] | None = None
    published: tuple[Published, ...] = ()

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Adapter patterns by placement; empty where the table names none.

        Raises:
            ConfigError: The layers are transposed.
        """
        self.check_layers(self.model_type)
        if not self.mlp:
            return {}
        return {"mlp": self.mlp, "attention": self.attention, "all": (*self.mlp, *self.attention)}

    def check_layers(self, model: str) -> None:
        """Refuses transposed layers, naming the model.

        Raises:
            ConfigError: The layers are transposed.
        """
        if self.transposed:
            raise ConfigError(
                f"model {model}: {self.model_type} stores its layers transposed (Conv1D), which"
                " adapters do not support; use a GPT-Neo, whose layers are nn.Linear"
            )

    def component_of(self, parameter: str) -> str:
        """``mlp``, ``attention``, ``head`` or ``other``, from a parameter's dotted name."""
        for part in parameter.split("."):
            for component, names in self.components.items():
                if part in names:
                    return component
        return "other"


def _llama_tiny(dim: int, depth: int, heads: int) -> Fields:
    width = -(-dim // 3) * 8  # 8/3 of the width, as in LLaMA, rounded up to a multiple of 8
    return {**_blocks(dim, depth, heads), "intermediate_size": width}


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


def _gpt_neo(name: str, hidden: int, depth: int, heads: int) -> Published:
    kinds = [[["global", "local"], depth // 2]]
    sizes = {"hidden_size": hidden, "num_layers": depth, "num_heads": heads}
    return Published(name.lower(), (f"EleutherAI/{name}",), {**sizes, "attention_types": kinds})


def _llama(
    name: str, ids: Sequence[str], sizes: tuple[int, int, int], keys: int, mlp: int, words: int
) -> Published:
    fields = {
        **_blocks(*sizes),
        "intermediate_size": mlp,
        "num_key_value_heads": keys,
        "vocab_size": words,
        "tie_word_embeddings": False,
    }
    return Published(name, tuple(ids), fields)


def _llama3(name: str, sizes: tuple[int, int, int], mlp: int) -> Published:
    base = f"meta-llama/Llama-3.1-{name}"
    ids = (base, f"{base}-Instruct")
    return _llama(f"llama-3.1-{name.lower()}", ids, sizes, 8, mlp, 128256)


_LLAMA2 = ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf")
_GATED_LAYERS: dict[str, Any] = {
    "mlp": _GATED,
    "attention": (*_QKV, "*self_attn.o_proj"),
}
_EXACT: dict[str, Any] = {"linear_head": True, "maskable": True}

FAMILIES: dict[str, CausalFamily] = {
    family.model_type: family
    for family in (
        CausalFamily(
            "gpt_neo",
            mlp=("*mlp.c_fc", "*mlp.c_proj"),
            attention=tuple(f"*attn.attention.{name}_proj" for name in ("q", "k", "v", "out")),
            **_EXACT,
            longest_row=_gpt_neo_row,
            tied=True,
            tiny=_gpt_neo_tiny,
            published=(
                _gpt_neo("gpt-neo-125m", 768, 12, 12),
                _gpt_neo("gpt-neo-1.3B", 2048, 24, 16),
                _gpt_neo("gpt-neo-2.7B", 2560, 32, 20),
            ),
        ),
        CausalFamily(
            "phi",
            mlp=("*mlp.fc1", "*mlp.fc2"),
            attention=(*_QKV, "*self_attn.dense"),
            **_EXACT,
            tiny=_phi_tiny,
            published=(
                Published(
                    "phi-1.5",
                    ("microsoft/phi-1_5",),
                    {**_blocks(2048, 24, 32), "intermediate_size": 8192, "vocab_size": 51200},
                ),
            ),
        ),
        CausalFamily(
            "llama",
            **_GATED_LAYERS,
            **_EXACT,
            tiny=_llama_tiny,
            published=(
                _llama(
                    "llama-2-7b",
                    (*_LLAMA2, "NousResearch/Llama-2-7b-chat-hf"),
                    (4096, 32, 32),
                    keys=32,
                    mlp=11008,
                    words=32000,
                ),
                _llama(
                    "llama-2-70b",
                    ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
                    (8192, 80, 64),
                    keys=8,
                    mlp=28672,
                    words=32000,
                ),
                _llama3("8B", (4096, 32, 32), mlp=14336),
                _llama3("70B", (8192, 80, 64), mlp=28672),
            ),
        ),
        CausalFamily("mistral", **_GATED_LAYERS, **_EXACT),
        CausalFamily("qwen2", **_GATED_LAYERS, **_EXACT),
        CausalFamily("gemma", **_GATED_LAYERS),
        CausalFamily(
            "gpt_neox",
            mlp=("*mlp.dense_h_to_4h", "*mlp.dense_4h_to_h"),
            attention=("*attention.query_key_value", "*attention.dense"),
            **_EXACT,
        ),
        CausalFamily("phi3", linear_head=True),
        CausalFamily("qwen3", linear_head=True),
        CausalFamily("gpt2", linear_head=True, transposed=True),
        CausalFamily("openai-gpt", transposed=True),
        CausalFamily("decision_transformer", transposed=True),
        CausalFamily("imagegpt", transposed=True),
    )
}
"""``model_type`` of transformers -> family."""


def family_of(model_type: str | None) -> CausalFamily:
    """The family of a model type; one without patterns and promises where the table has no row."""
    return FAMILIES.get(model_type or "") or CausalFamily(model_type or "unknown")


def tiny_family(kind: str) -> CausalFamily:
    """The family of a tiny model.

    Raises:
        ConfigError: The table has no tiny model of this kind.
    """
    kinds = [name for name, family in FAMILIES.items() if family.tiny is not None]
    if kind not in kinds:
        raise ConfigError(f"model.kind {kind}: no tiny model{did_you_mean(kind, kinds)}")
    return FAMILIES[kind]


def published_models() -> dict[str, tuple[CausalFamily, Published]]:
    """Short name -> family and sizes of the models that can be counted without a network."""
    return {
        model.name: (family, model) for family in FAMILIES.values() for model in family.published
    }


def published_sizes(hub_id: str) -> tuple[str, Fields] | None:
    """(model type, config fields) of a hub id; None where its sizes are not in the table."""
    for family, model in published_models().values():
        if hub_id in model.ids:
            return family.model_type, model.sizes
    return None


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether a module's dotted name fits one of the patterns."""
    return any(fnmatch.fnmatch(module, pattern) for pattern in patterns)
