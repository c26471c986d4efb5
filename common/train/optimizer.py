"""Optimizers, the length of a run, and its learning rate step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from common.data.loader import Loader
from common.train.config import FitConfig

BETAS = (0.9, 0.999)
"""Of AdamW, as torch's defaults, which the loop takes."""


def make_optimizer(config: FitConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD; weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, eps=config.eps, fused=True)


class AdamW:
    """AdamW with a rate per run, where torch's optimizer has one rate for all entries.

    It is also what small programs take that cannot wait for ``torch.optim`` to start.

    Formula: ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``; ``p <- (1 - lr decay) p -
    lr m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps)`` (Loshchilov and Hutter,
    arXiv 1711.05101).

    Args:
        parameters: What is trained; every entry needs a gradient at :meth:`step`.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, of every parameter.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, eps: float = 1e-8, weight_decay: float = 0.0
    ):
        self.parameters, self.eps, self.weight_decay = list(parameters), eps, weight_decay
        self.count = 0
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]

    @torch.no_grad()
    def step(self, rates: Tensor) -> None:
        """Moves every parameter and clears its gradient.

        Args:
            rates: float64, () or broadcastable over the parameters, such as (K, 1, 1).
        """
        self.count += 1
        beta1, beta2 = BETAS
        correction = 1 - beta1**self.count, (1 - beta2**self.count) ** 0.5
        for parameter, (first, second) in zip(self.parameters, self._moments, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            if self.weight_decay:
                parameter.mul_((1 - rates * self.weight_decay).to(parameter.dtype))
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (second.sqrt() / correction[1]).add_(self.eps)
            parameter.sub_((rates / correction[0]).to(parameter.dtype) * first / scale)
            parameter.grad = None


def total_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> int:
    """Optimizer steps of a run; epochs count passes over the first loader."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    first = next(iter(loaders.values()))
    return math.ceil(config.epochs * first.batches_per_epoch / config.accumulation)


def warmup_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> int:
    """Optimizer steps of the warm-up; epochs count passes over the first loader, rounded up."""
    if config.warmup_epochs is None:
        return config.warmup_steps
    first = next(iter(loaders.values()))
    return math.ceil(config.warmup_epochs * first.batches_per_epoch / config.accumulation)


def evaluation_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> tuple[int, int]:
    """(steps between evaluations, 0 for none; steps before which none of them stops the run)."""
    if config.evaluate_epochs is None and config.min_epochs is None:
        return config.evaluate_every, 0
    first = next(iter(loaders.values()))
    epoch = math.ceil(first.batches_per_epoch / config.accumulation)
    every = config.evaluate_every or epoch * (config.evaluate_epochs or 0)
    return every, epoch * (config.min_epochs or 0)


def learning_rate(config: FitConfig, step: int, total: int, warmup: int | None = None) -> float:
    """Rate of optimizer step ``step`` (from 0): linear warm-up, then the schedule.

    Args:
        config: Rate and schedule.
        step: Optimizer step.
        total: Optimizer steps in all; ``linear`` and ``cosine`` are 0 there.
        warmup: Steps of the warm-up (:func:`warmup_steps`); ``config.warmup_steps`` when absent.
    """
    warmup = config.warmup_steps if warmup is None else warmup
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
