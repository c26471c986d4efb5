"""What is trained is float32, whatever the type of the weights.

AdamW's steps at the usual rates are smaller than half a unit in the last place of most bfloat16
weights, so such weights would hardly move.  While they are trained they are float32, and forward
passes run under autocast; afterwards each has its own type again, rounded once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from common.train.config import FitConfig

LOW = (torch.bfloat16, torch.float16)


def in_low_precision(model: nn.Module) -> bool:
    """Whether any weight has fewer bits than float32: forward passes then need autocast."""
    return any(parameter.dtype in LOW for parameter in model.parameters())


@contextlib.contextmanager
def full_precision(model: nn.Module, config: FitConfig) -> Iterator[FitConfig]:
    """The trained low-precision parameters of ``model`` are float32 inside.

    Yields:
        The training's config: mixed types need autocast, in bfloat16 unless it says another.
    """
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype in LOW]
    dtypes = [parameter.dtype for parameter in trained]
    for parameter in trained:
        _cast(parameter, torch.float32)
    try:
        mixed = bool(trained) and config.mixed_precision == "no"
        yield config.model_copy(update={"mixed_precision": "bf16"}) if mixed else config
    finally:
        for parameter, dtype in zip(trained, dtypes, strict=True):
            _cast(parameter, dtype)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.grad = None
    parameter.data = parameter.data.to(dtype)
