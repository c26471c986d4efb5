"""How far adapters have moved, and in which share of their entries the bound acts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.common.bounded.polynomial import OddPolynomial
from stable_forgetting.common.bounded.quantised import base_weight


def shares_beyond(model: nn.Module, thresholds: Sequence[float]) -> list[float]:
    """Per threshold, the share of all adapted entries with |frequency * A B^T| above it."""
    beyond, entries = [0] * len(thresholds), 0
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            arguments = layer.arguments().abs()
            for index, threshold in enumerate(thresholds):
                beyond[index] += int((arguments > threshold).sum())
            entries += arguments.numel()
    return [count / max(entries, 1) for count in beyond]


def adapter_statistics(model: nn.Module) -> dict[str, float]:
    """How far each adapter has moved, and whether the bound acts.

    Returns:
        ``delta_ratio``: ||dW||_F / ||W0||_F over all adapted layers together; ``delta_ratio_max``:
        of the worst layer; ``max_argument``: max |frequency * A B^T|; ``bound_active``: share of
        entries whose |argument| is above :attr:`Bound.curved_from`; ``certificate``: ||dW||_F over
        the bound's own ceiling (0 if none).
        The two ratios to W0 are left out where a quantised layer gives no dense weight.
        With a polynomial mode also ``polynomial_layers``: share of the layers whose dW is a product
        of monomials at these factors; ``polynomial_error``: the largest relative error of theirs.
    """
    layers = [layer for _, layer in adapted_layers(model)]
    with torch.no_grad():
        seen = [_moved(layer) for layer in layers]
    table = torch.stack([row.to(seen[0].device) for row in seen]).tolist() if seen else []
    delta2, base2 = sum(row[0] for row in table), sum(max(row[1], 0.0) for row in table)
    entries = [len(layer.A) * layer.Bt.shape[1] for layer in layers]
    ceiling2 = sum(
        layer.entry_bound**2 * count for layer, count in zip(layers, entries, strict=True)
    )
    ratios = {
        "delta_ratio": math.sqrt(delta2 / base2) if base2 else 0.0,
        "delta_ratio_max": max([0.0, *(math.sqrt(r[0] / r[1]) for r in table if r[1] > 0)]),
    }
    fitted = [layer.polynomial() for layer in layers if layer.config.polynomial]
    return (ratios if all(row[1] >= 0 for row in table) else {}) | {
        "max_argument": max([0.0, *(row[2] for row in table)]),
        "bound_active": sum(row[3] for row in table) / max(sum(entries), 1.0),
        "certificate": math.sqrt(delta2 / ceiling2) if math.isfinite(ceiling2) else 0.0,
        **_polynomials(fitted),
    }


def _moved(layer: BoundedLinear) -> Tensor:
    """||dW||^2, ||W0||^2 (-1 if unknown), max |argument|, arguments in the bend; nothing waits."""
    moved, weight = layer.delta().float().square().sum(), base_weight(layer)
    base = moved.new_tensor(-1.0) if weight is None else weight.float().square().sum()
    arguments = layer.arguments().abs()
    active = (arguments > layer.bound.curved_from).sum()
    return torch.stack([v.double() for v in (moved, base, arguments.max(), active)])


def _polynomials(fitted: Sequence[OddPolynomial | None]) -> dict[str, float]:
    if not fitted:
        return {}
    errors = [polynomial.error for polynomial in fitted if polynomial is not None]
    return {
        "polynomial_layers": len(errors) / len(fitted),
        "polynomial_error": max(errors, default=0.0),
    }
