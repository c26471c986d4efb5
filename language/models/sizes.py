"""Linear layers of causal models: where adapters go, and how many parameters there are.

Layers are read from names and shapes: of a model, of a stored one, or of a config's closed form
(GPT-Neo, Phi, LLaMA and Mistral, published or tiny).  No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.family import among
from stable_forgetting.common.protocol.sizes import (
    Shape,
    Sizes,
    adapter_parameters,
    linear_parameters,
)
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.models.families import (
    CausalFamily,
    family_of,
    published_sizes,
    tiny_family,
)

Linear = Mapping[str, Shape]
Group = dict[str, Shape]
"""Linear layers of one module: last part of the name -> (outputs, inputs)."""


def linear_layers(model: Any) -> dict[str, Shape]:
    """Dotted name -> (outputs, inputs) of a model's linear layers."""
    from torch import nn

    return {
        name: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }


def family_in(model: Any) -> CausalFamily:
    """The family of a model, its layers read from its modules where the table names none."""
    return completed(family_of(model.config.model_type), linear_layers(model))


def completed(family: CausalFamily, linear: Linear) -> CausalFamily:
    """A family whose table row names no layers, with those that its blocks have.

    The attention is told by its name.  The MLP is told by its shapes: one layer leads back to the
    width of the others' inputs.  Both must be found in every block, so that no adapter leaves
    blocks out (as it would where some blocks have experts).

    Args:
        linear: Dotted name -> (outputs, inputs) of the linear layers.
    """
    if family.mlp or not linear:
        return family
    stack, blocks = _main_stack(linear)
    return replace(
        family,
        mlp=_in_every_block(stack, blocks, _is_mlp),
        attention=_in_every_block(stack, blocks, _is_attention),
        layers=tuple(dict.fromkeys(f"*.{name}" for block in blocks for name in _names(block))),
    )


def _main_stack(linear: Linear) -> tuple[str, list[dict[str, Group]]]:
    """The blocks of the stack with the most weights: module in the block -> its linear layers."""
    stacks: dict[str, dict[str, dict[str, Group]]] = {}
    weights: dict[str, int] = {}
    for name, shape in linear.items():
        parts = name.split(".")
        place = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        if place is None:
            continue
        stack, module = ".".join(parts[:place]), ".".join(parts[place + 1 : -1])
        block = stacks.setdefault(stack, {}).setdefault(parts[place], {})
        block.setdefault(module, {})[parts[-1]] = shape
        weights[stack] = weights.get(stack, 0) + shape[0] * shape[1]
    largest = max(weights, key=weights.__getitem__, default="")
    return largest, list(stacks.get(largest, {}).values())


def _in_every_block(
    stack: str, blocks: list[dict[str, Group]], fits: Callable[[str, Group], bool]
) -> tuple[str, ...]:
    """Patterns of the layers of the modules that fit; none where a block has no such module."""
    found: dict[str, None] = {}
    for block in blocks:
        own = {module: group for module, group in block.items() if fits(module, group)}
        if not own:
            return ()
        found |= dict.fromkeys(f"*{stack}.*.{name}" for name in _names(own))
    return tuple(found)


def _names(block: Mapping[str, Group]) -> Iterator[str]:
    for module, group in block.items():
        yield from (f"{module}.{leaf}".lstrip(".") for leaf in group)


def _is_attention(module: str, group: Group) -> bool:
    own = module.rpartition(".")[2]
    return "attn" in own or "attention" in own


def _is_mlp(module: str, group: Group) -> bool:
    """Whether one layer (w, m) goes back and all others are (m, w), or (2 m, w) where fused."""
    if _is_attention(module, group) or "." in module:
        return False
    for leaf, (width, inner) in group.items():
        others = [shape for name, shape in group.items() if name != leaf]
        if others and all(shape in ((inner, width), (2 * inner, width)) for shape in others):
            return True
    return False


HEAD = "lm_head"


def sizes_of(config: CausalModelConfig) -> Sizes | None:
    """Sizes of a model; None where neither the tables nor the config tell them."""
    published = published_sizes(config.name)
    if published is not None:
        return causal_sizes(*published)
    if config.name != "tiny" or not isinstance(config.tokenizer, int):
        return None
    assert config.kind and config.dim and config.depth and config.heads
    family = tiny_family(config.kind)
    assert family.tiny is not None
    fields = family.tiny(config.dim, config.depth, config.heads)
    own = {"vocab_size": config.tokenizer, "tie_word_embeddings": True}
    own["max_position_embeddings"] = config.context or 0
    return causal_sizes(family.model_type, {**fields, **own})


def model_type_of(config: CausalModelConfig) -> str:
    """``model_type`` of a model that the tables know, else empty."""
    published = published_sizes(config.name)
    return config.kind or "" if published is None else published[0]


def targets_of(config: CausalModelConfig, sizes: Sizes) -> Mapping[str, Sequence[str]]:
    """Adapter patterns by placement of a model of known sizes."""
    return completed(family_of(model_type_of(config)), sizes.linear).targets


def causal_sizes(model_type: str, fields: Mapping[str, Any]) -> Sizes | None:
    """Sizes by the fields of a transformers config; None for other architectures."""
    formula = FORMULAS.get(model_type)
    return None if formula is None else formula(fields)


def _stacked(
    block: Mapping[str, Shape], stack: str, depth: int, entries: int, *, bias: bool, rest: int
) -> Sizes:
    """Sizes of a stack of equal blocks: their linear layers, a head, and ``rest`` parameters."""
    width = next(iter(block.values()))[1]
    linear = {f"{stack}.{i}.{name}": shape for i in range(depth) for name, shape in block.items()}
    count = linear_parameters(linear, bias=bias) + rest
    return Sizes(count, {**linear, HEAD: (entries, width)}, width, depth, entries)


def _gpt_neo(fields: Mapping[str, Any]) -> Sizes:
    width, depth = fields["hidden_size"], fields["num_layers"]
    inner, entries = 4 * width, fields.get("vocab_size", 50257)
    block = {f"attn.attention.{name}_proj": (width, width) for name in ("k", "v", "q", "out")}
    block |= {"mlp.c_fc": (inner, width), "mlp.c_proj": (width, inner)}
    biases = depth * (width + inner + width)  # those of q, k and v are absent
    embeddings = width * (entries + fields.get("max_position_embeddings", 2048))
    rest = biases + embeddings + 2 * width * (2 * depth + 1)
    return _stacked(block, "transformer.h", depth, entries, bias=False, rest=rest)


def _phi(fields: Mapping[str, Any]) -> Sizes:
    width, depth = fields["hidden_size"], fields["num_hidden_layers"]
    inner, entries = fields["intermediate_size"], fields["vocab_size"]
    block = {
        f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "dense")
    }
    block |= {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
    tables = 1 if fields.get("tie_word_embeddings") else 2
    rest = tables * entries * width + entries + 2 * width * (depth + 1)
    return _stacked(block, "model.layers", depth, entries, bias=True, rest=rest)


def _llama(fields: Mapping[str, Any]) -> Sizes:
    width, depth = fields["hidden_size"], fields["num_hidden_layers"]
    inner, entries = fields["intermediate_size"], fields["vocab_size"]
    heads = fields["num_attention_heads"]
    narrow = width // heads * fields.get("num_key_value_heads", heads)
    outputs = {"q": width, "k": narrow, "v": narrow, "o": width}
    block = {f"self_attn.{name}_proj": (size, width) for name, size in outputs.items()}
    block |= {f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
    block["mlp.down_proj"] = (width, inner)
    tables = 1 if fields.get("tie_word_embeddings") else 2
    rest = tables * entries * width + width * (2 * depth + 1)
    return _stacked(block, "model.layers", depth, entries, bias=False, rest=rest)


FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], Sizes]] = {
    "gpt_neo": _gpt_neo,
    "phi": _phi,
    "llama": _llama,
    "mistral": _llama,
}
"""``model_type`` of transformers -> closed form."""


def countable(config: CausalModelConfig) -> bool:
    """Whether :func:`count_targets` needs no network and no data."""
    return published_sizes(config.name) is not None or isinstance(config.tokenizer, int)


def count_targets(
    config: CausalModelConfig,
    rank: int,
    *,
    placement: str = "mlp",
    targets: Sequence[str] | None = None,
) -> tuple[int, int]:
    """Counts adapters on a model without allocating or fetching a weight.

    Args:
        placement: Which patterns of the architecture are adapted.
        targets: Patterns that replace them.

    Returns:
        sum of rank * (inputs + outputs) over the matched layers, and the parameters of the model
        without adapters (a tied head counts once).

    Raises:
        ConfigError: No layer matches.
        DataError: The config of an unknown model cannot be fetched.
    """
    sizes, model_type = sizes_of(config), model_type_of(config)
    if sizes is None:
        sizes, model_type = _built(config)
    family = completed(family_of(model_type), sizes.linear)
    patterns = targets or family.targets.get(placement, ())
    layers = sizes.matched(patterns)
    if not layers:
        raise ConfigError(
            f"model {config.name}: no layer of a {model_type} for placement {placement}; give"
            f" targets{among(family.layers)}"
        )
    return adapter_parameters(layers, rank), sizes.parameters


def _built(config: CausalModelConfig) -> tuple[Sizes, str]:
    """Counted on the architecture; its model type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stable_forgetting.language.models.build import fetch_config, tiny_config

    published = published_sizes(config.name)
    if config.name == "tiny":
        assert isinstance(config.tokenizer, int), "a tiny model needs its vocabulary"
        architecture = tiny_config(config, config.tokenizer, None)
    elif published is not None:
        architecture = AutoConfig.for_model(published[0], **published[1])
    else:
        architecture = fetch_config(config.name, config.revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    return Sizes(count, linear_layers(model), 0, 0, 0), architecture.model_type
