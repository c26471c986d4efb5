"""The adapted layer beside its peers, as parts of models that are compared.

Peers: the same layer frozen (the floor), LoRA of the peft library, and the bounded layer with one
product on ``W0 + dW`` by autograd (merged).  In units of one k x d product per token, forward and
backward cost 2 (frozen, LoRA) and 3 (ours, merged).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.vision.models.family import VIT
from tools.perf.timing import Run, seeded

SINE = AdapterConfig(phi="sine", omega=100.0)
LORA = AdapterConfig()
OURS_SINE, OURS_LORA = "ours, sine", "ours, identity"
MERGED = "merged, autograd"
PEFT, FROZEN = "PEFT LoRA", "frozen"
Targets = tuple[tuple[str, ...], str]
"""Where adapters go, as our patterns and as PEFT's regular expression."""
VIT_MLP: Targets = (VIT.mlp, r"blocks\.\d+\.mlp\.fc[12]")
GPT_MLP: Targets = (("*.mlp.c_fc", "*.mlp.c_proj"), r".*\.mlp\.c_(fc|proj)")
ONE: Targets = (("0",), "0")


class MergedBounded(nn.Module):
    """One product on ``W0 + dW``, differentiated by autograd: it keeps k x d matrices."""

    def __init__(self, layer: BoundedLinear):
        super().__init__()
        self.weight, self.bias, self.A, self.Bt = layer.weight, layer.bias, layer.A, layer.Bt
        self.amplitude, self.frequency = layer.bound.amplitude, layer.bound.frequency

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k)."""
        delta = self.amplitude * torch.sin(self.frequency * (self.A @ self.Bt))
        return F.linear(x, self.weight + delta, self.bias)


def with_layers(model: nn.Module, kind: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy of the model with layers of ``kind`` in the place of ours."""
    copied = copy.deepcopy(model)
    for name, layer in list(adapted_layers(copied)):
        copied.set_submodule(name, kind(layer))
    return copied


def _adapted(base: nn.Module, patterns: Sequence[str], config: AdapterConfig) -> nn.Module:
    """Adapters whose A has entries of 1e-3: with A = 0 nothing differs."""
    model = copy.deepcopy(base)
    attach(model, patterns, config, generator(0, "perf", "factors"))
    for name, layer in adapted_layers(model):
        draw = torch.randn(layer.A.shape, generator=generator(0, "perf", name))
        layer.A.data.copy_(1e-3 * draw)
    return model


def _peft(base: nn.Module, regex: str, ours: nn.Module, rank: int) -> nn.Module:
    """peft's LoRA with the factors of ``ours`` (their B is our A, their A our Bt)."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise UserError("this benchmark compares with peft: pip install '.[dev]'") from None
    config = LoraConfig(r=rank, lora_alpha=int(LORA.alpha), lora_dropout=0.0, target_modules=regex)
    model: nn.Module = inject_adapter_in_model(config, copy.deepcopy(base))
    for name, layer in adapted_layers(ours):
        theirs: Any = model.get_submodule(name)
        theirs.lora_B["default"].weight.data.copy_(layer.A.data)
        theirs.lora_A["default"].weight.data.copy_(layer.Bt.data)
    return model


def variants_of(
    base: nn.Module, targets: Targets, names: Sequence[str], rank: int = SINE.rank
) -> dict[str, nn.Module]:
    """Name -> model, all on the weights of ``base``, which is not changed."""
    patterns, regex = targets
    frozen = copy.deepcopy(base).requires_grad_(False)
    models = {FROZEN: frozen}
    for name, preset in ((OURS_SINE, SINE), (OURS_LORA, LORA)):
        models[name] = _adapted(frozen, patterns, preset.model_copy(update={"rank": rank}))
    models[MERGED] = with_layers(models[OURS_SINE], MergedBounded)
    models[PEFT] = _peft(frozen, regex, models[OURS_LORA], rank)
    return {name: models[name] for name in names}


def linear(d: int, k: int) -> nn.Module:
    """One layer ``d -> k``, always of the same weights."""
    with seeded():
        return nn.Sequential(nn.Linear(d, k))


# One layer ---------------------------------------------------------------------------------------


def layer_runs(models: Mapping[str, nn.Module], x: Tensor, upstream: Tensor) -> dict[str, Run]:
    """Forward and backward of one layer; ``x`` requires a gradient, as inside a model."""

    def run(model: nn.Module) -> object:
        asked = [x, *(p for p in model.parameters() if p.requires_grad)]
        return torch.autograd.grad(model(x), asked, upstream)

    return {name: partial(run, model) for name, model in models.items()}
