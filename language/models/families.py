"""What is known of each family of causal models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.base.errors import ConfigError

LINEAR_HEADS = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3"}
)
"""Model types whose logits are one linear map of the decoder's last hidden state, nothing more."""

MASKABLE = frozenset({"gpt_neo", "gpt_neox", "llama", "mistral", "phi", "qwen2"})
"""Model types that take a whole attention mask (N, 1, T, T) and explicit positions."""

MASKABLE_ATTENTION = ("eager", "sdpa")
LONGEST_ROW = 1024


Patterns = Mapping[str, tuple[str, ...]]


def _placements(mlp: Sequence[str], attention: Sequence[str]) -> Patterns:
    return {"mlp": tuple(mlp), "attention": tuple(attention), "all": (*mlp, *attention)}


_GATED = ("*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj")
_QKV = ("*self_attn.q_proj", "*self_attn.k_proj", "*self_attn.v_proj")
_LLAMA = _placements(_GATED, (*_QKV, "*self_attn.o_proj"))

TARGETS: Mapping[str, Patterns] = {
    "gpt_neo": _placements(
        ("*mlp.c_fc", "*mlp.c_proj"),
        tuple(f"*attn.attention.{name}_proj" for name in ("q", "k", "v", "out")),
    ),
    "phi": _placements(("*mlp.fc1", "*mlp.fc2"), (*_QKV, "*self_attn.dense")),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "gemma": _LLAMA,
    "gpt_neox": _placements(
        ("*mlp.dense_h_to_4h", "*mlp.dense_4h_to_h"),
        ("*attention.query_key_value", "*attention.dense"),
    ),
}
"""Architecture (``model_type``) -> placement of adapters -> patterns of module names."""

HEAD = ("lm_head.*", "embed_out.*")
"""Parameter names of the language-model head; absent where it is tied to the embeddings."""

_COMPONENTS = {
    "mlp": "mlp",
    "attn": "attention",
    "attention": "attention",
    "self_attn": "attention",
    "lm_head": "head",
    "embed_out": "head",
}
_TRANSPOSED = frozenset({"gpt2", "openai-gpt", "decision_transformer", "imagegpt"})


def _refuse_transposed(model_type: str, name: str) -> None:
    if model_type in _TRANSPOSED:
        raise ConfigError(
            f"model {name}: {model_type} stores its layers transposed (Conv1D), which adapters"
            " do not support; use a GPT-Neo, whose layers are nn.Linear"
        )


# -- parameters -----------------------------------------------------------------------------------


def targets_of(model_type: str) -> Patterns:
    """Adapter patterns by placement; empty for an architecture that is not in the table.

    Raises:
        ConfigError: GPT-2 and its kin, whose layers are transposed.
    """
    _refuse_transposed(model_type, model_type)
    return TARGETS.get(model_type, {})


def component_of(parameter_name: str) -> str:
    """``mlp``, ``attention``, ``head`` or ``other``, from a parameter's dotted name."""
    for part in parameter_name.split("."):
        if part in _COMPONENTS:
            return _COMPONENTS[part]
    return "other"


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }


_SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "EleutherAI/gpt-neo-125m": ("gpt_neo", {"hidden_size": 768, "num_layers": 12}),
    "EleutherAI/gpt-neo-1.3B": ("gpt_neo", {"hidden_size": 2048, "num_layers": 24}),
    "EleutherAI/gpt-neo-2.7B": ("gpt_neo", {"hidden_size": 2560, "num_layers": 32}),
    "microsoft/phi-1_5": (
        "phi",
        {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192},
    ),
    "meta-llama/Llama-2-7b-hf": ("llama", {}),
    "meta-llama/Llama-2-7b-chat-hf": ("llama", {}),
    "NousResearch/Llama-2-7b-chat-hf": ("llama", {}),
    "meta-llama/Llama-3.1-8B": ("llama", _llama3(4096, 14336, 32, 32)),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", _llama3(4096, 14336, 32, 32)),
    "meta-llama/Llama-3.1-70B": ("llama", _llama3(8192, 28672, 80, 64)),
    "meta-llama/Llama-3.1-70B-Instruct": ("llama", _llama3(8192, 28672, 80, 64)),
}
"""Sizes of published models, so that counting needs no network; never used to run one."""
