"""Models of published shapes with random weights and few blocks, for full steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.language.models.families import published_models, tiny_family
from stable_forgetting.vision.models.family import VIT
from tools.perf.adapters import VIT_MLP
from tools.perf.bounded_layer import GPT_MLP

Targets = tuple[tuple[str, ...], str]
LLAMA_MLP: Targets = (("*.mlp.*_proj",), r".*\.mlp\.(gate|up|down)_proj")


@dataclass(frozen=True)
class Body:
    """A model, its batch, and where its adapters go.

    Attributes:
        build: (device, type of weights) -> model.
        loss: Device -> (model -> loss) on a fixed batch.
        targets: Of the MLPs, as our patterns and as PEFT's regular expression.
        anchor: A parameter before the first block, which every way trains.
        tokens: Of a batch.
    """

    name: str
    build: Callable[[str, torch.dtype], nn.Module]
    loss: Callable[[str], Callable[[nn.Module], Tensor]]
    targets: Targets
    anchor: str
    tokens: int


def bodies(tiny: bool) -> list[Body]:
    """ViT-S/16, ViT-B/16, GPT-Neo-1.3B with 4 of 24 blocks, LLaMA-2-7B with 2 of 32."""
    if tiny:
        return [_vit("tiny ViT", "test_vit", 1, 101), _llama("tiny LLaMA", None, 2, (2, 8))]
    return [
        _vit("ViT-S/16", "vit_small_patch16_224", 21, 197),
        _vit("ViT-B/16", "vit_base_patch16_224", 21, 197),
        _gpt_neo("GPT-Neo-1.3B, 4 blocks", 4, (8, 512)),
        _llama("LLaMA-2-7B, 2 blocks", "llama-2-7b", 2, (8, 512)),
    ]


def _vit(name: str, architecture: str, images: int, each: int) -> Body:
    def build(device: str, dtype: torch.dtype) -> nn.Module:
        import timm

        with torch.device(device):
            return cast(nn.Module, timm.create_model(architecture, num_classes=10)).to(dtype)

    def loss(device: str) -> Callable[[nn.Module], Tensor]:
        stream = generator(0, "gpu", "images")
        side = 160 if architecture == "test_vit" else 224
        x = torch.randn(images, 3, side, side, generator=stream).to(device)
        labels = torch.randint(0, 10, (images,), generator=stream).to(device)
        return lambda model: F.cross_entropy(model(x.to(next(model.parameters()).dtype)), labels)

    return Body(name, build, loss, (VIT.mlp, VIT_MLP), "pos_embed", images * each)


def _gpt_neo(name: str, blocks: int, batch: tuple[int, int]) -> Body:
    fields = dict(published_models()["gpt-neo-1.3b"][1].sizes)
    fields |= {"num_layers": blocks, "attention_types": [[["global", "local"], blocks // 2]]}
    quiet = {f"{part}_dropout": 0.0 for part in ("resid", "embed", "attention")}
    return _causal(name, "gpt_neo", {**fields, **quiet}, GPT_MLP, "transformer.wpe.weight", batch)


def _llama(name: str, published: str | None, blocks: int, batch: tuple[int, int]) -> Body:
    if published is None:
        shape = tiny_family("llama").tiny
        assert shape is not None
        fields = {**shape(16, blocks, 2), "vocab_size": 40}
    else:
        fields = dict(published_models()[published][1].sizes)
    anchor = "model.layers.0.input_layernorm.weight"
    fields = {**fields, "num_hidden_layers": blocks}
    return _causal(name, "llama", fields, LLAMA_MLP, anchor, batch)


def _causal(
    name: str,
    kind: str,
    fields: dict[str, Any],
    targets: Targets,
    anchor: str,
    batch: tuple[int, int],
) -> Body:
    def build(device: str, dtype: torch.dtype) -> nn.Module:
        return random_causal(kind, fields, device, dtype)

    def loss(device: str) -> Callable[[nn.Module], Tensor]:
        entries = fields.get("vocab_size", 50257)
        words = torch.randint(0, entries, batch, generator=generator(0, "gpu", "words")).to(device)
        return lambda model: cast(Tensor, model(input_ids=words, labels=words).loss)

    return Body(name, build, loss, targets, anchor, batch[0] * batch[1])


def random_causal(kind: str, fields: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """A causal model of transformers, drawn where it will lie."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **{**fields, **ends, "use_cache": False})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
