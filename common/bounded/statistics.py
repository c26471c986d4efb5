"""What is logged of adapters in training: norms and the share of the bound that acts."""

from __future__ import annotations

import math

import torch
from torch import nn

from common.bounded.layer import adapted_layers
from common.bounded.quantised import (
    base_weight,
)


def adapter_statistics(model: nn.Module) -> dict[str, float]:
    """How far each adapter has moved, and whether the bound acts.

    Returns:
        ``delta_ratio``: ||dW||_F / ||W0||_F over all adapted layers together; ``delta_ratio_max``:
        of the worst layer; ``max_argument``: max |inner A B^T|; ``bound_active``: share of entries
        with |argument| > 0.5; ``certificate``: ||dW||_F over the bound's own ceiling (0 if none).
        The two ratios to W0 are left out where a quantised layer gives no dense weight.
    """
    delta2 = base2 = active = entries = ceiling2 = 0.0
    worst = largest = 0.0
    measurable = True
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            moved = float(layer.delta().float().square().sum())
            weight = base_weight(layer)
            measurable = measurable and weight is not None
            base = 0.0 if weight is None else float(weight.float().square().sum())
            arguments = layer.arguments().abs()
            delta2, base2 = delta2 + moved, base2 + base
            worst = max(worst, math.sqrt(moved / base) if base else 0.0)
            largest = max(largest, float(arguments.max()))
            active += float((arguments > 0.5).sum())
            entries += arguments.numel()
            ceiling2 += layer.entry_bound**2 * arguments.numel()
    ratios = {
        "delta_ratio": math.sqrt(delta2 / base2) if base2 else 0.0,
        "delta_ratio_max": worst,
    }
    return (ratios if measurable else {}) | {
        "max_argument": largest,
        "bound_active": active / max(entries, 1.0),
        "certificate": math.sqrt(delta2 / ceiling2) if math.isfinite(ceiling2) else 0.0,
    }
