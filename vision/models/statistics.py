"""Batch normalisation whose running statistics stay as they are."""

from __future__ import annotations

from typing import Any

from torch import nn


def freeze_statistics(model: nn.Module) -> None:
    """From now on batch normalisation takes its running statistics in training too.

    What a training lowers is then the loss of the model that is measured, and no batch of forget
    samples alone decides how retain samples are normalised.  Gains and shifts stay trainable.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_pre_hook(_as_in_evaluation)


def _as_in_evaluation(module: nn.Module, _: Any) -> None:
    module.training = False
