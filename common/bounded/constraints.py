"""Constraints on the factors: clipping, ball projection, penalty."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.product import gram_norm


class Factors(Protocol):
    """An adapted layer, or K of them on one frozen weight.

    Attributes:
        weight: (k, d), frozen.
        bound: phi with its factors.
        A: (k, r) or (K, k, r).
        Bt: (r, d) or (K, r, d).
    """

    weight: Tensor
    bound: Bound
    A: nn.Parameter
    Bt: nn.Parameter


@torch.no_grad()
def clip_layer_(layer: Factors, threshold: float) -> None:
    """Projects every entry of A and B of one layer to [-threshold, threshold]."""
    layer.A.clamp_(-threshold, threshold)
    layer.Bt.clamp_(-threshold, threshold)


def ball_radius(layer: Factors, c: float) -> float:
    """``c ||W0||_F``."""
    return c * float(torch.linalg.vector_norm(layer.weight.float()))


@torch.no_grad()
def project_layer_(layer: Factors, radius: float) -> Tensor:
    """Scales A and B of one layer so that ``||dW||_F <= radius``; 0 is no ball.

    Returns:
        () or (K,): whether it was outside.  A norm that is not finite stays: the divergence guard
        reports it.
    """
    norm = layer.bound.outer * layer.bound.inner * gram_norm(layer.A, layer.Bt)
    outside = (norm > radius) & norm.isfinite() & (radius > 0)
    factor = torch.where(outside, (radius / norm).sqrt() * (1 - 1e-6), 1.0)
    for parameter in (layer.A, layer.Bt):
        parameter.mul_(factor.to(parameter.dtype)[..., None, None])
    return outside


@torch.no_grad()
def clip_factors_(model: nn.Module, threshold: float) -> None:
    """Weight clipping: projects every entry of A and B to [-threshold, threshold]."""
    for _, layer in adapted_layers(model):
        clip_layer_(layer, threshold)


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
        radius = ball_radius(layer, c)
        total += radius > 0
        outside += int(project_layer_(layer, radius))
    return outside / max(total, 1)


def factor_penalty(model: nn.Module) -> Tensor:
    """``sum over layers of ||A B^T||_F^2``, differentiable (the paper's open question)."""
    terms = [((la.A.mT @ la.A) * (la.Bt @ la.Bt.mT)).sum() for _, la in adapted_layers(model)]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
