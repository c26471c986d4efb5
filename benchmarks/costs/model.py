"""``unlearn show bounded [--plan MODEL]``: what the layer is, and what it costs on a known model.

Models are built from their published sizes on the meta device: nothing is downloaded or allocated.
The formulas are in :mod:`benchmarks.costs.layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.costs import layer as costs
from benchmarks.costs.layer import Layers
from common.base.config import did_you_mean
from common.base.errors import ConfigError
from language.models.families import CausalFamily, matches, published_models

if TYPE_CHECKING:
    from torch import nn


NAME = "bounded"
PLACEMENTS = ("mlp", "attention", "all")


@dataclass(frozen=True)
class Model:
    """A model whose layers can be counted.

    Attributes:
        library: ``timm`` or ``transformers``.
        sizes: What the library builds it from.
        base: What the number of parameters includes.
    """

    library: str
    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    sizes: Mapping[str, Any]
    base: str

    def patterns(self, placement: str) -> tuple[str, ...]:
        """Patterns of a placement."""
        chosen = {"mlp": self.mlp, "attention": self.attention, "all": self.mlp + self.attention}
        return chosen[placement]


def _vit(size: str) -> Model:
    sizes = {"model_name": f"vit_{size}_patch16_224", "num_classes": 10}
    attention = ("*.attn.qkv", "*.attn.proj")
    return Model("timm", ("*.mlp.fc?",), attention, sizes, "with a head of 10 classes")


def _causal(family: CausalFamily, sizes: Mapping[str, Any]) -> Model:
    tied = "embeddings included, the head tied to them"
    base = tied if family.tied else "embeddings and head included"
    sizes = {"model_type": family.model_type, **sizes}
    return Model("transformers", family.mlp, family.attention, sizes, base)


MODELS: Mapping[str, Model] = {
    **{name: _causal(family, model.sizes) for name, (family, model) in published_models().items()},
    "vit-s": _vit("small"),
    "vit-b": _vit("base"),
    "vit-l": _vit("large"),
}


@dataclass(frozen=True)
class LayerCosts:
    """What adapters on one model cost.

    Attributes:
        base: Parameters without adapters.
        linear: Weights of all linear layers.
        tokens: N of one forward pass.
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
        """Adapters in percent of the parameters without them."""
        return 100 * self.trained / self.base

    @property
    def percent_of_all(self) -> float:
        """Adapters in percent of the parameters with them, as PEFT prints it."""
        return 100 * self.trained / (self.base + self.trained)

    @property
    def share(self) -> float:
        """Share of the linear layers' weights that is adapted."""
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
    built = _on_meta(MODELS[model])
    from torch import nn

    linear = {name: m for name, m in built.named_modules() if isinstance(m, nn.Linear)}
    patterns = MODELS[model].patterns(placement)
    chosen = {n: m for n, m in linear.items() if matches(n, patterns)}
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


def _on_meta(model: Model) -> nn.Module:
    import torch

    with torch.device("meta"):
        if model.library == "timm":
            import timm

            return timm.create_model(**model.sizes)
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.sizes))


def _by_shape(linear: Mapping[str, Any]) -> tuple[Layers, ...]:
    """Layers of one shape together, in the model's order."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for name, module in linear.items():
        k, d = module.weight.shape
        shapes.setdefault((k, d), []).append(name.rpartition(".")[2])
    return tuple(
        Layers(k, d, len(names), tuple(dict.fromkeys(names))) for (k, d), names in shapes.items()
    )
