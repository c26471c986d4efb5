"""Length of a run, and its learning rate step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from stable_forgetting.common.data.loader import Loader


def total_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> int:
    """Optimizer steps of a run."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return steps_in(config, config.epochs, loaders)


def warmup_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> int:
    """Optimizer steps of the warm-up.

    Raises:
        ConfigError: There are as many as in the whole run.
    """
    if config.warmup_epochs is None:
        warmup = config.warmup_steps
    else:
        warmup = steps_in(config, config.warmup_epochs, loaders)
    if warmup and warmup >= (total := total_steps(config, loaders)):
        raise ConfigError(
            f"a warm-up of {warmup} steps leaves nothing of a run of {total}: give more epochs or "
            "steps, or lower warmup_steps (of Original: protocol.train.warmup_steps)"
        )
    return warmup


def evaluation_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> tuple[int, int]:
    """(steps between evaluations, 0 for none; steps before which none of them stops the run)."""
    if config.evaluate_epochs is None and config.min_epochs is None:
        return config.evaluate_every, 0
    epoch = steps_in(config, 1, loaders)
    every = config.evaluate_every or epoch * (config.evaluate_epochs or 0)
    return every, epoch * (config.min_epochs or 0)


def steps_in(config: FitConfig, epochs: float, loaders: Mapping[str, Loader]) -> int:
    """Optimizer steps of so many passes over the part that is counted.

    Raises:
        ConfigError: ``epochs_of`` names no part of this training.
    """
    part = next(iter(loaders)) if config.epochs_of is None else config.epochs_of
    if part not in loaders:
        raise ConfigError(
            f"epochs_of: this training reads no part '{part}'{did_you_mean(part, [*loaders])}"
        )
    if config.timing == "transformers":
        return max(1, int(epochs * loaders[part].samples / config.batch_size))
    return math.ceil(epochs * loaders[part].batches_per_epoch / config.accumulation)


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
        return config.lr * (step + (config.timing == "own")) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
