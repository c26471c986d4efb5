"""``unlearn show bounded [--plan MODEL]``: what the layer is, and what it costs on a known model.

Models are counted in closed form from their published sizes: nothing is built or downloaded.
The formulas are in :mod:`benchmarks.costs.layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stable_forgetting.benchmarks.costs import layer as costs
from stable_forgetting.benchmarks.costs.layer import Layers
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.sizes import Shape, Sizes
from stable_forgetting.language.models.families import CausalFamily, Published, published_models
from stable_forgetting.language.models.sizes import causal_sizes
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models.family import family_of
from stable_forgetting.vision.models.sizes import sizes_of as vit_sizes

NAME = "bounded"
PLACEMENTS = ("mlp", "attention", "all")


@dataclass(frozen=True)
class Model:
    """A model whose layers can be counted.

    Attributes:
        base: What the number of parameters includes.
    """

    sizes: Sizes
    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    base: str

    def patterns(self, placement: str) -> tuple[str, ...]:
        """Patterns of a placement."""
        chosen = {"mlp": self.mlp, "attention": self.attention, "all": self.mlp + self.attention}
        return chosen[placement]


def _vit(size: str) -> Model:
    name = f"vit_{size}_patch16_224"
    sizes, family = vit_sizes(ModelConfig(name=name), num_classes=10), family_of(name)
    assert sizes is not None
    return Model(sizes, family.mlp, family.attention, "with a head of 10 classes")


def _causal(family: CausalFamily, published: Published) -> Model:
    tied = "embeddings included, the head tied to them"
    base = tied if family.tied else "embeddings and head included"
    sizes = causal_sizes(family.model_type, published.sizes)
    assert sizes is not None
    return Model(sizes, family.mlp, family.attention, base)


MODELS: Mapping[str, Model] = {
    **{name: _causal(family, model) for name, (family, model) in published_models().items()},
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
    """Counts a known model's layers.

    Raises:
        ConfigError: There is no such model or placement, or a size is not positive.
    """
    if model not in MODELS:
        hint = did_you_mean(model, [*MODELS])
        raise ConfigError(f"--plan {model}: no such model{hint}")
    if placement not in PLACEMENTS:
        raise ConfigError(f"--placement {placement}: choose {', '.join(PLACEMENTS)}")
    sizes = MODELS[model].sizes
    chosen = sizes.matched(MODELS[model].patterns(placement))
    return LayerCosts(
        model=model,
        base=sizes.parameters,
        linear=sizes.weights,
        layers=_by_shape(chosen),
        rank=rank,
        tokens=tokens,
        placement=placement,
    )


def _by_shape(linear: Mapping[str, Shape]) -> tuple[Layers, ...]:
    """Layers of one shape together, in the model's order."""
    shapes: dict[Shape, list[str]] = {}
    for name, shape in linear.items():
        shapes.setdefault(shape, []).append(name.rpartition(".")[2])
    return tuple(
        Layers(k, d, len(names), tuple(dict.fromkeys(names))) for (k, d), names in shapes.items()
    )
