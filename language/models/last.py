"""The last layers of a causal model: a normalisation and a linear head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stable_forgetting.common.measure.ceiling import LastLayers
from stable_forgetting.language.models.backbone import backbone, unwrapped
from stable_forgetting.language.models.families import family_of


def last_layers(model: nn.Module) -> LastLayers | None:
    """The decoder's last normalisation and the head; None where the family names none.

    A head that is tied to the embedding is one all the same: adapters leave both alone.
    """
    inner: Any = unwrapped(model)
    parts = backbone(inner)
    name = family_of(getattr(getattr(inner, "config", None), "model_type", None)).last_norm
    if parts is None or not name:
        return None
    norm: Any = parts.decoder.get_submodule(name)
    head: Any = parts.head
    centred = isinstance(norm, nn.LayerNorm)  # the others divide by the root mean square alone
    shift = norm.bias if centred else None
    bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
    shift = torch.zeros_like(norm.weight) if shift is None else shift
    return LastLayers(norm.weight, shift, head.weight, bias, centred=centred)
