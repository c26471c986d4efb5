"""Length of a run, and its learning rate step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from common.data.loader import Loader
from common.train.config import FitConfig


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
