"""What is trained is float32, whatever the type of the weights.

AdamW's steps at the usual rates are smaller than half a unit in the last place of most bfloat16
weights, so such weights would hardly move.  While they are trained they are float32, and forward
passes run under autocast; afterwards each has its own type again, rounded once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from stable_forgetting.common.train.config import FitConfig

LOW = (torch.bfloat16, torch.float16)
T = TypeVar("T")


def in_low_precision(model: nn.Module) -> bool:
    """Whether any weight has fewer bits than float32: forward passes then need autocast."""
    return any(parameter.dtype in LOW for parameter in model.parameters())


@contextlib.contextmanager
def tensor_float(device: torch.device | str) -> Iterator[None]:
    """On a card, float32 products round their operands to TF32 inside: for scores, 8 times faster.

    It is as deterministic as float32, and records say it.  Elsewhere nothing changes.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def full_precision(
    model: nn.Module, config: FitConfig
) -> Iterator[tuple[FitConfig, Mapping[str, torch.dtype]]]:
    """The trained low-precision parameters of ``model`` are float32 inside.

    So are frozen vectors beside them, such as a LayerNorm's: its input may be float32 then, and
    PyTorch takes no such input with bfloat16 weights on a CPU.  They come back as they were.

    Yields:
        The training's config: mixed types need autocast, in bfloat16 unless it says another.
        Names of the parameters that are float32 -> their own types.
    """
    low = {name: p for name, p in model.named_parameters() if p.dtype in LOW}
    trained = any(parameter.requires_grad for parameter in low.values())
    lifted = {n: p for n, p in low.items() if trained and (p.requires_grad or p.ndim < 2)}
    types = {name: parameter.dtype for name, parameter in lifted.items()}
    for parameter in lifted.values():
        _cast(parameter, torch.float32)
    try:
        mixed = trained and config.mixed_precision == "no"
        yield config.model_copy(update={"mixed_precision": "bf16"}) if mixed else config, types
    finally:
        for name, parameter in lifted.items():
            _cast(parameter, types[name])


Look = Callable[[nn.Module, int], T]
"""(model, step) -> what one sees in it."""


def as_stored(look: Look[T] | None, types: Mapping[str, torch.dtype]) -> Look[T] | None:
    """``look`` at the model as it would be kept, each weight rounded to its own type."""
    if look is None or not types:
        return look

    def rounded(model: nn.Module, step: int) -> T:
        exact = {n: (p, p.data) for n, p in model.named_parameters() if n in types}
        try:
            for name, (parameter, data) in exact.items():
                parameter.data = data.to(types[name])
            return look(model, step)
        finally:
            for parameter, data in exact.values():
                parameter.data = data

    return rounded


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.grad = None
    parameter.data = parameter.data.to(dtype)
