"""The classifier head as a layer: found by the task's patterns, widened, narrowed."""

from __future__ import annotations

import fnmatch
import math

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.methods.task import UnlearnTask


def head_name(task: UnlearnTask) -> str:
    """Name of the linear layer that makes the logits.

    Raises:
        ConfigError: There is none, or several, or it shares its weight with another layer.
    """
    names: list[str] = [
        name
        for name, module in task.model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == task.family.num_classes
        and any(fnmatch.fnmatch(f"{name}.weight", pattern) for pattern in task.family.head)
    ]
    if len(names) != 1:
        heads = ", ".join(names) or "none"
        raise ConfigError(
            f"this method needs one linear head of {task.family.num_classes} logits "
            f"(found: {heads}); choose another method for this model"
        )
    weight = task.model.get_submodule(names[0]).weight
    if sum(getattr(module, "weight", None) is weight for module in task.model.modules()) > 1:
        raise ConfigError(
            f"this method changes the size of {names[0]}, whose weight is that of another layer "
            "too (tied); choose another method for this model"
        )
    return names[0]


@torch.no_grad()
def widen_head(model: nn.Module, name: str, generator: torch.Generator) -> None:
    """Gives a linear head one more row, drawn from U(+-1/sqrt d) as torch draws a layer's."""
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    bound = 1 / math.sqrt(old.in_features)

    def extended(tensor: Tensor) -> Tensor:
        row = torch.rand(1, *tensor.shape[1:], generator=generator) * 2 * bound - bound
        return torch.cat([tensor, row.to(tensor)])

    _replace(model, name, extended(old.weight), None if old.bias is None else extended(old.bias))


@torch.no_grad()
def narrow_head(model: nn.Module, name: str, width: int) -> None:
    """Keeps the first ``width`` rows of a linear head."""
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    bias = None if old.bias is None else old.bias[:width].clone()
    _replace(model, name, old.weight[:width].clone(), bias)


def _replace(model: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    setattr(module, child, layer.train(module.training))
