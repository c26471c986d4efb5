"""Constraints on the factors: clipping, ball projection, penalty."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.base.errors import ConfigError
from common.bounded.find import adapted_layers
from common.bounded.product import gram_norm


@torch.no_grad()
def clip_factors_(model: nn.Module, threshold: float) -> None:
    """Weight clipping: projects every entry of A and B to [-threshold, threshold]."""
    for _, layer in adapted_layers(model):
        layer.A.clamp_(-threshold, threshold)
        layer.Bt.clamp_(-threshold, threshold)


@torch.no_grad()
def project_ball_(model: nn.Module, c: float) -> float:
    """Scales A and B of each layer so that ``||dW||_F <= c ||W0||_F``; ours, not the paper's.

    phi is 1-Lipschitz with phi(0) = 0, so ``outer * inner * ||A B^T||_F`` bounds ``||dW||_F``
    (with equality for plain LoRA).  Layers with ``W0 = 0`` are skipped.  Related: norm-bounded
    LoRA (arXiv 2501.19050).

    Returns:
        Share of layers that were outside their ball.

    Raises:
        ConfigError: A layer has a start: scaling A and B does not shrink what is left of it.
    """
    outside = total = 0
    for _, layer in adapted_layers(model):
        if layer.start is not None:
            raise ConfigError("ball: no certificate for an adapter with a start; start from zero")
        radius = c * float(torch.linalg.vector_norm(layer.weight.float()))
        if radius == 0.0:
            continue
        total += 1
        slope = layer.bound.outer * layer.bound.inner
        norm = slope * gram_norm(layer.A, layer.Bt)
        if not torch.isfinite(norm):
            continue  # the divergence guard reports it
        if norm > radius:
            outside += 1
            factor = (radius / norm).sqrt() * (1 - 1e-6)
            layer.A.mul_(factor)
            layer.Bt.mul_(factor)
            after = slope * gram_norm(layer.A, layer.Bt)
            assert after <= radius * (1 + 1e-4), f"projection left the ball: {after} > {radius}"
    return outside / max(total, 1)


def factor_penalty(model: nn.Module) -> Tensor:
    """``sum over layers of ||A B^T||_F^2``, differentiable (the paper's open question)."""
    terms = [((la.A.mT @ la.A) * (la.Bt @ la.Bt.mT)).sum() for _, la in adapted_layers(model)]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
