"""Parameter counts of models and adapters, without a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.family import among
from stable_forgetting.common.protocol.sizes import Sizes, adapter_parameters
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.models.families import family_of, published_sizes
from stable_forgetting.language.models.layers import completed, linear_layers
from stable_forgetting.language.models.sizes import model_type_of, sizes_of


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


def countable(config: CausalModelConfig) -> bool:
    """Whether :func:`count_targets` needs no network and no data."""
    return published_sizes(config.name) is not None or isinstance(config.tokenizer, int)


def count_targets(
    config: CausalModelConfig,
    rank: int,
    *,
    placement: str = "mlp",
    targets: Sequence[str] | None = None,
    vocab_size: int | None = None,
) -> ParameterShare:
    """Counts adapters on a model without allocating or fetching a weight.

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
    sizes, model_type = sizes_of(config, vocab_size), model_type_of(config)
    if sizes is None:
        sizes, model_type = _built(config, vocab_size)
    family = completed(family_of(model_type), sizes.linear)
    patterns = targets or family.targets.get(placement, ())
    layers = sizes.matched(patterns)
    if not layers:
        raise ConfigError(
            f"model {config.name}: no layer of a {model_type} for placement {placement}; give"
            f" targets{among(family.layers)}"
        )
    return ParameterShare(adapter_parameters(layers, rank), sizes.parameters)


def _built(config: CausalModelConfig, vocab_size: int | None) -> tuple[Sizes, str]:
    """Counted on the architecture; its model type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stable_forgetting.language.models.build import fetch_config, tiny_config

    published = published_sizes(config.name)
    if config.name == "tiny":
        entries = vocab_size or config.tokenizer
        assert isinstance(entries, int), "a tiny model needs its vocabulary"
        architecture = tiny_config(config, entries, None)
    elif published is not None:
        architecture = AutoConfig.for_model(published[0], **published[1])
    else:
        architecture = fetch_config(config.name, config.revision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    model.tie_weights()
    count = sum(p.numel() for p in model.parameters())
    return Sizes(count, linear_layers(model), 0, 0, 0), architecture.model_type
