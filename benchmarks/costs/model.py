"""``unlearn show bounded [--plan MODEL]``: what the layer is, and what it costs on a known model.

Models are built from their published sizes on the meta device: nothing is downloaded or allocated.
The formulas are in :mod:`benchmarks.costs.layer`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.costs import layer as costs
from benchmarks.costs.layer import Layers
from common.base.config import did_you_mean
from common.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


NAME = "bounded"
PLACEMENTS = ("mlp", "attention", "all")


@dataclass(frozen=True)
class Family:
    """Models that are built alike.

    Attributes:
        library: ``timm``, or a prefix of transformers' class names.
        mlp: Glob patterns of the MLP's linear layers.
        attention: Glob patterns of the attention's.
        base: What the number of parameters includes.
    """

    library: str
    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    base: str = "embeddings and head included"

    def patterns(self, placement: str) -> tuple[str, ...]:
        """Patterns of a placement."""
        chosen = {"mlp": self.mlp, "attention": self.attention, "all": self.mlp + self.attention}
        return chosen[placement]


LLAMA = Family("Llama", ("*.mlp.*_proj",), ("*.self_attn.*_proj",))
PHI = Family("Phi", ("*.mlp.fc?",), ("*.self_attn.*_proj", "*.self_attn.dense"))
GPT_NEO = Family(
    "GPTNeo",
    ("*.mlp.c_fc", "*.mlp.c_proj"),
    ("*.attention.*_proj",),
    "embeddings included, the head tied to them",
)
VIT = Family("timm", ("*.mlp.fc?",), ("*.attn.qkv", "*.attn.proj"), "with a head of 10 classes")


def _llama(hidden: int, mlp: int, depth: int, heads: int, keys: int, words: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": words,
        "tie_word_embeddings": False,
    }


def _gpt_neo(hidden: int, depth: int, heads: int) -> dict[str, Any]:
    kinds = [[["global", "local"], depth // 2]]
    return {
        "hidden_size": hidden,
        "num_layers": depth,
        "num_heads": heads,
        "attention_types": kinds,
    }


MODELS: Mapping[str, tuple[Family, dict[str, Any]]] = {
    "llama-2-7b": (LLAMA, _llama(4096, 11008, 32, 32, 32, 32000)),
    "llama-2-70b": (LLAMA, _llama(8192, 28672, 80, 64, 8, 32000)),
    "llama-3.1-8b": (LLAMA, _llama(4096, 14336, 32, 32, 8, 128256)),
    "llama-3.1-70b": (LLAMA, _llama(8192, 28672, 80, 64, 8, 128256)),
    "phi-1.5": (
        PHI,
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 51200,
        },
    ),
    "gpt-neo-125m": (GPT_NEO, _gpt_neo(768, 12, 12)),
    "gpt-neo-1.3b": (GPT_NEO, _gpt_neo(2048, 24, 16)),
    "gpt-neo-2.7b": (GPT_NEO, _gpt_neo(2560, 32, 20)),
    "vit-s": (VIT, {"model_name": "vit_small_patch16_224", "num_classes": 10}),
    "vit-b": (VIT, {"model_name": "vit_base_patch16_224", "num_classes": 10}),
    "vit-l": (VIT, {"model_name": "vit_large_patch16_224", "num_classes": 10}),
}


@dataclass(frozen=True)
class LayerCosts:
    """What adapters on one model cost.

    Attributes:
        model: Its name.
        base: Parameters without adapters.
        linear: Weights of all linear layers.
        layers: What is adapted, by shape.
        rank: r.
        tokens: N of one forward pass.
        placement: Which layers were asked for.
    """

    model: str
    base: int
    linear: int
    layers: tuple[Layers, ...]
    rank: int
    tokens: int
    placement: str

    @property
    def trained(self) -> int:
        """Parameters of the adapters."""
        return costs.adapter_parameters(self.layers, self.rank)

    @property
    def percent(self) -> float:
        """Of the parameters without adapters."""
        return 100 * self.trained / self.base

    @property
    def percent_of_all(self) -> float:
        """Of the parameters with adapters, as PEFT prints it."""
        return 100 * self.trained / (self.base + self.trained)

    @property
    def share(self) -> float:
        """Of the linear layers' weights, what is adapted."""
        return sum(layer.weights for layer in self.layers) / self.linear


def layer_costs(
    model: str, *, rank: int = 8, tokens: int = 4096, placement: str = "mlp"
) -> LayerCosts:
    """Counts a known model's layers on the meta device.

    Raises:
        ConfigError: There is no such model or placement, or a size is not positive.
    """
    if model not in MODELS:
        hint = did_you_mean(model, [*MODELS])
        raise ConfigError(f"--plan {model}: no such model{hint}")
    if placement not in PLACEMENTS:
        raise ConfigError(f"--placement {placement}: choose {', '.join(PLACEMENTS)}")
    family, sizes = MODELS[model]
    built = _on_meta(family, sizes)
    from torch import nn

    linear = {name: m for name, m in built.named_modules() if isinstance(m, nn.Linear)}
    patterns = family.patterns(placement)
    chosen = {n: m for n, m in linear.items() if any(fnmatch.fnmatch(n, p) for p in patterns)}
    assert chosen, f"{model}: {patterns} match nothing"
    return LayerCosts(
        model=model,
        base=sum(parameter.numel() for parameter in built.parameters()),
        linear=sum(module.weight.numel() for module in linear.values()),
        layers=_by_shape(chosen),
        rank=rank,
        tokens=tokens,
        placement=placement,
    )


def _on_meta(family: Family, sizes: Mapping[str, Any]) -> nn.Module:
    import torch

    with torch.device("meta"):
        if family.library == "timm":
            import timm

            return timm.create_model(**sizes)
        import transformers

        config = getattr(transformers, f"{family.library}Config")(**sizes)
        return getattr(transformers, f"{family.library}ForCausalLM")(config)


def _by_shape(linear: Mapping[str, Any]) -> tuple[Layers, ...]:
    """Layers of one shape together, in the model's order."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for name, module in linear.items():
        k, d = module.weight.shape
        shapes.setdefault((k, d), []).append(name.rpartition(".")[2])
    return tuple(
        Layers(k, d, len(names), tuple(dict.fromkeys(names))) for (k, d), names in shapes.items()
    )
