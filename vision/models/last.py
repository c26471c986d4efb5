"""The last layers of a classifier: a layer normalisation and a linear head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stable_forgetting.common.measure.ceiling import LastLayers

BETWEEN = ("attn_pool", "head_dist", "aux_head")
"""What some transformers of timm have between norm and head, or add to its logits."""


def last_layers(model: nn.Module) -> LastLayers | None:
    """The LayerNorm and the head of a timm transformer; None if it does not end in these.

    A mean over patches lies in the ball that their sphere bounds, so the pooling does not matter.
    """
    network: Any = model
    if any(getattr(network, name, None) is not None for name in BETWEEN):
        return None
    head = getattr(network, "head", None)
    head = getattr(head, "fc", head)  # timm's heads with a pooling of their own
    own = getattr(network, "fc_norm", None)
    norm = own if isinstance(own, nn.LayerNorm) else getattr(network, "norm", None)
    if not (isinstance(norm, nn.LayerNorm) and isinstance(head, nn.Linear)):
        return None
    gain, shift = norm.weight, norm.bias
    if gain is None or head.in_features != norm.normalized_shape[-1]:
        return None
    bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
    return LastLayers(gain, torch.zeros_like(gain) if shift is None else shift, head.weight, bias)
