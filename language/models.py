"""Causal language models: Hugging Face's by id or folder, or tiny ones from scratch.

Weights are drawn from a seed without touching the global random state, and read from safetensors
only; code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError, DataError
from common.hub import one_line, prepare_client
from common.loading import Batch
from language.schemas import CausalModelConfig

logger = logging.getLogger(__name__)

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
    found = getattr(inner, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, nn.Module) else None


# -- building -------------------------------------------------------------------------------------


def build_model(
    config: CausalModelConfig, vocab_size: int, seed: int, *, end: int | None = None
) -> Any:
    """A causal language model; the same seed gives the same bits.

    Args:
        config: Which model.
        vocab_size: Entries of the tokenizer.
        seed: Of the weights that are not loaded.
        end: Id of the end-of-sequence token, for a tiny model's config.

    Returns:
        A ``PreTrainedModel`` on the CPU, or where ``device_map`` puts it.

    Raises:
        ConfigError: The architecture is not supported, or the vocabulary is too small.
        DataError: Config or weights cannot be fetched or read.
    """
    if config.name == "tiny":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed % 2**63)
            model = _from_config(config, _tiny(config, vocab_size, end))
    else:
        model = _load(config, config.name)
    return _prepared(model, config, vocab_size)


def blank_model(config: CausalModelConfig, vocab_size: int, *, end: int | None = None) -> Any:
    """The architecture with arbitrary weights and without fetching any, to load a state into."""
    if config.name == "tiny":
        return build_model(config, vocab_size, 0, end=end)
    with torch.random.fork_rng(devices=[]), _no_init():
        model = _from_config(config, _fetch_config(config.name, config.revision))
    return _prepared(model, config, vocab_size)


def _no_init() -> AbstractContextManager[Any]:
    """Leaves new weights as they lie in memory: drawing those of a large model takes minutes."""
    new = importlib.util.find_spec("transformers.initialization")  # its place since version 5
    where = "initialization" if new else "modeling_utils"
    return importlib.import_module(f"transformers.{where}").no_init_weights()


def load_published(config: CausalModelConfig, name: str, vocab_size: int) -> Any:
    """A published Original or Retrain (id or folder) in the settings of ``config``."""
    return _prepared(_load(config, name), config, vocab_size)


def _prepared(model: Any, config: CausalModelConfig, vocab_size: int) -> Any:
    entries = model.get_input_embeddings().num_embeddings
    if entries < vocab_size:
        raise ConfigError(
            f"model {config.name}: has {entries} embeddings for a tokenizer of {vocab_size};"
            " leave model.tokenizer out or give the model's own"
        )
    if config.gradient_checkpointing:
        # not re-entrant: adapters on a frozen model get gradients although its inputs need none
        old = model.gradient_checkpointing_enable  # its name before transformers 5
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    return model


def _tiny(config: CausalModelConfig, vocab_size: int, end: int | None) -> Any:
    from transformers import GPTNeoConfig, LlamaConfig, PhiConfig

    assert config.dim and config.depth and config.heads and config.context
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": config.dim,
        "max_position_embeddings": config.context,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }
    if config.kind == "gpt_neo":
        return GPTNeoConfig(
            **common,
            num_layers=config.depth,
            num_heads=config.heads,
            attention_types=[[["global"], config.depth]],
            attention_dropout=0.0,
            embed_dropout=0.0,
            resid_dropout=0.0,
        )
    blocks: dict[str, Any] = {
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
    }
    if config.kind == "phi":
        return PhiConfig(**common, **blocks, intermediate_size=4 * config.dim)
    return LlamaConfig(**common, **blocks, intermediate_size=_llama_width(config.dim))


def _llama_width(dim: int) -> int:
    """8/3 of the width, as in LLaMA, rounded up to a multiple of 8."""
    return -(-dim // 3) * 8


def _from_config(config: CausalModelConfig, architecture: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        architecture,
        dtype=getattr(torch, config.dtype),
        attn_implementation=config.attention,
        trust_remote_code=False,
    )


def _load(config: CausalModelConfig, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    _fetch_config(name, config.revision)
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            name,
            revision=config.revision,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attention,
            device_map=config.device_map,
            ignore_mismatched_sizes=True,  # told below, by name
            output_loading_info=True,
        )
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise CheckpointError(
            f"model {name}: its safetensors weights cannot be read ({one_line(error)}); give a"
            " folder with config.json and *.safetensors, or run once on a machine with a network"
        ) from None
    for key, stored, wanted in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"model {name}: its safetensors hold {key} as {tuple(stored)}, and config.json makes it"
            f" {tuple(wanted)}; give the config.json that belongs to them"
        )
    if report["missing_keys"]:  # they would be drawn at random
        raise CheckpointError(
            f"model {name}: its safetensors lack {min(report['missing_keys'])} and"
            f" {len(report['missing_keys']) - 1} other(s); give weights that fit its config.json"
        )
    return model


def _fetch_config(name: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    prepare_client()
    try:
        found = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # as above
        raise DataError(
            f"model {name}: its config cannot be read ({one_line(error)}); give a folder with"
            " config.json, name: tiny, or run once on a machine with a network"
        ) from None
    _refuse_transposed(found.model_type, name)
    return found


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


@dataclass(frozen=True)
class ParameterShare:
    """Trainable parameters of rank-r adapters beside the parameters of the model without them."""

    trainable: int
    base: int

    @property
    def percent(self) -> float:
        """100 * trainable / base."""
        return 100 * self.trainable / self.base

    @property
    def percent_of_all(self) -> float:
        """100 * trainable / (base + trainable): what PEFT prints, and papers quote."""
        return 100 * self.trainable / (self.base + self.trainable)


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


def sizes_known(config: CausalModelConfig) -> bool:
    """Whether :func:`count_targets` needs no network and no data."""
    return config.name in _SIZES or isinstance(config.tokenizer, int)


def _architecture(config: CausalModelConfig, vocab_size: int | None) -> Any:
    """The transformers config of a model, for shapes only."""
    from transformers import AutoConfig

    if config.name == "tiny":
        assert isinstance(vocab_size or config.tokenizer, int), "a tiny model needs its vocabulary"
        return _tiny(config, int(vocab_size or config.tokenizer or 0), None)
    if config.name not in _SIZES:
        return _fetch_config(config.name, config.revision)
    model_type, sizes = _SIZES[config.name]
    heads: dict[str, Any] = {}
    if model_type == "gpt_neo":
        kinds = [[["global", "local"], sizes["num_layers"] // 2]]
        heads = {"attention_types": kinds, "num_heads": sizes["hidden_size"] // 64}
    return AutoConfig.for_model(model_type, **sizes, **heads)


def count_targets(
    config: CausalModelConfig,
    rank: int,
    *,
    placement: str = "mlp",
    targets: Sequence[str] | None = None,
    vocab_size: int | None = None,
) -> ParameterShare:
    """Counts adapters on a model without allocating or fetching a weight (meta device).

    Args:
        config: Which model; the sizes of the paper's models are known without a network.
        rank: Of the adapters.
        placement: Which patterns of the architecture are adapted.
        targets: Patterns that replace them.
        vocab_size: Of a tiny model, where it is not the size of the tokenizer to train.

    Returns:
        sum of rank * (inputs + outputs) over the matched layers, and the parameters of the model
        (a tied head counts once).

    Raises:
        ConfigError: No layer matches.
        DataError: The config of an unknown model cannot be fetched.
    """
    from transformers import AutoModelForCausalLM

    architecture = _architecture(config, vocab_size)
    patterns = targets or targets_of(architecture.model_type).get(placement, ())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    model.tie_weights()
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and any(fnmatch.fnmatch(name, p) for p in patterns)
    ]
    if not layers:
        raise ConfigError(
            f"model {config.name}: no layer of a {architecture.model_type} for placement"
            f" {placement}; give targets"
        )
    trainable = rank * sum(layer.in_features + layer.out_features for layer in layers)
    return ParameterShare(trainable, sum(p.numel() for p in model.parameters()))
