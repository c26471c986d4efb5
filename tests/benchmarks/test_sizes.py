"""Closed forms of models' sizes against the models themselves, built without weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.models import sizes as causal
from stable_forgetting.language.models.build import tiny_config
from stable_forgetting.language.models.families import PUBLISHED
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models.build import construct
from stable_forgetting.vision.models.sizes import positions_of, sizes_of

VITS = {
    "vit_small_patch16_224.augreg_in21k": 197,
    "vit_base_patch16_224.augreg_in21k": 197,
    "vit_large_patch14_clip_224.openai_ft_in12k_in1k": 257,
    "deit_small_patch16_224.fb_in1k": 197,
}
SCRATCH = (
    {},
    {"stem": "conv", "patch_size": 4, "pool": "avg"},
    {"stem": "conv", "patch_size": 4, "mlp_ratio": 2.5},
)


def counted(model: nn.Module):
    linear = {
        name: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    return sum(p.numel() for p in model.parameters()), [*linear.items()]


def built(architecture):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture)
    model.tie_weights()
    return counted(model)


def of(sizes):
    return sizes.parameters, [*sizes.linear.items()]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_causal_models(name):
    model_type, fields = PUBLISHED[name]
    architecture = AutoConfig.for_model(model_type, **fields)
    sizes = causal.causal_sizes(model_type, fields)
    assert of(sizes) == built(architecture)
    assert (sizes.width, sizes.outputs) == (architecture.hidden_size, architecture.vocab_size)


@pytest.mark.parametrize("kind", causal.FORMULAS)
def test_tiny_causal_models(kind):
    config = CausalModelConfig(kind=kind, tokenizer=1000)
    assert of(causal.sizes_of(config)) == built(tiny_config(config, 1000, None))


@pytest.mark.parametrize("name", VITS)
def test_vision_transformers(name):
    config = ModelConfig(name=name)
    with torch.device("meta"):
        model = construct(config, 100, 3, None)
    assert of(sizes_of(config, num_classes=100)) == counted(model)
    assert positions_of(config) == VITS[name]


@pytest.mark.parametrize("fields", SCRATCH)
def test_vision_transformers_from_scratch(fields):
    config = ModelConfig(**fields)
    with torch.device("meta"):
        model = construct(config, 10, 1, config.image_size)
    assert of(sizes_of(config, num_classes=10, in_chans=1)) == counted(model)


def test_what_no_formula_knows():
    assert sizes_of(ModelConfig(name="resnet18"), num_classes=5) is None
    assert sizes_of(ModelConfig(name="vit_base_patch16_224_miil.in21k"), num_classes=5) is None
    assert causal.sizes_of(CausalModelConfig(name="owner/unknown")) is None
