"""Parameter counts of models and adapters, on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common.base.errors import ConfigError
from language.config import CausalModelConfig
from language.models.build import fetch_config, tiny_config
from language.models.families import family_of, matches, published_sizes


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


def _architecture(config: CausalModelConfig, vocab_size: int | None) -> Any:
    """The transformers config of a model, for shapes only."""
    from transformers import AutoConfig

    if config.name == "tiny":
        assert isinstance(vocab_size or config.tokenizer, int), "a tiny model needs its vocabulary"
        return tiny_config(config, int(vocab_size or config.tokenizer or 0), None)
    published = published_sizes(config.name)
    if published is None:
        return fetch_config(config.name, config.revision)
    model_type, sizes = published
    return AutoConfig.for_model(model_type, **sizes)


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
    patterns = targets or family_of(architecture.model_type).targets.get(placement, ())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    model.tie_weights()
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and matches(name, patterns)
    ]
    if not layers:
        raise ConfigError(
            f"model {config.name}: no layer of a {architecture.model_type} for placement"
            f" {placement}; give targets"
        )
    trainable = rank * sum(layer.in_features + layer.out_features for layer in layers)
    return ParameterShare(trainable, sum(p.numel() for p in model.parameters()))
