"""The config of the engine, and the length and rates that follow from it; without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from stable_forgetting.common import data
from stable_forgetting.common.base.config import did_you_mean, validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.numbers import Amount, Count, NonNegative, Positive

Optimizer = Literal["adamw", "sgd", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]
Minutes = Annotated[str, Field(pattern=r"^\d+(\.\d+)?min$")]


def _readable(limits: Any) -> Any:
    """The limits as they are, if each is one."""
    if limits == "goal":
        return limits
    if not isinstance(limits, Mapping):
        raise ValueError("write {metric: number}, or goal")
    for name, limit in limits.items():
        try:
            limit == "retrain" or float(limit)
        except (TypeError, ValueError):
            raise ValueError(f"{name}: write a number or retrain (got {limit!r})") from None
    return limits


Limits = Annotated[
    dict[str, float | Literal["retrain"]] | Literal["goal"], BeforeValidator(_readable)
]
"""Metric -> the value below which a training stops, or where it comes from."""
COUNTED = ("epochs", "warmup_epochs", "evaluate_epochs", "min_epochs")
"""Fields in passes over a part."""
LATER: Mapping[str, Any] = {
    "warmup_epochs": None,
    "evaluate_epochs": None,
    "min_epochs": None,
    "timing": "own",
    "average": "samples",
    "lr_of": {},
}
"""Fields that are hashed only where they differ from this."""


class FitConfig(Grown):
    """One training run of the engine.

    Attributes:
        steps: Optimizer steps; exactly one of ``steps`` and ``epochs`` is given.
        epochs: Passes over the part that ``epochs_of`` names.
        epochs_of: The part whose passes are counted wherever something is given in epochs; the
            loader named first when absent.
        timing: ``transformers`` counts as TOFU's and LoKU's code does through that library: steps
            and warm-up are rounded down (but to one at least), and the first step of a warm-up has
            rate 0.  ``own`` rounds up, and the last step of a warm-up has the whole rate.
        batch_size: Samples per optimizer step and per named loader.
        optimizer: AdamW, or SGD with ``momentum``.  The other three are AdamW of bitsandbytes: with
            moments of 8 bits, or paged to main memory while a card is full.
        lr: Its learning rate, after warm-up and before the schedule lowers it.
        lr_of: Learning rates of parameters whose name matches a glob pattern, such as
            ``{"head.*": 1e-3}``, in the place of ``lr``; the first match counts.  The schedule
            scales them too; the slope of an adapter does not.
        weight_decay: Decoupled from the gradient under AdamW, part of it under SGD; of matrices and
            kernels alone, where most published code for images decays biases and norms too.
        momentum: Of SGD.
        eps: Of AdamW: added to the root of the second moment.
        schedule: Learning rate after warm-up; ``linear`` and ``cosine`` end at 0.
        warmup_steps: Linear warm-up from 0; shorter than the run.
        warmup_epochs: The same in epochs, where given.
        accumulation: Micro-batches per optimizer step; divides ``batch_size``.  What a method does
            with a batch as a whole (a rule of two gradients, weights or negatives within it, a
            bound on its mean) it does with each micro-batch.
        max_grad_norm: Global gradient-norm clipping; off when absent (as in the paper).
        mixed_precision: Autocast precision.
        loss_cap: A loss part above this in absolute value counts as divergence.
        checkpoint_every: Steps between mid-stage checkpoints, or minutes, such as ``10min``.
        log_every: Steps between logged scalars.
        probe_every: Steps between full gradient probes of frozen and trained weights by component
            (one extra forward and backward each); 0 is off.
        evaluate_every: Steps between evaluations of the model in training (the trajectory); 0 is
            off.  The last step is what is reported, whatever the trajectory says.
        evaluate_epochs: The same in epochs, instead of ``evaluate_every``.
        min_epochs: No evaluation stops the run before this many passes.
        stop_below: Stop at the first evaluation where every metric named here is below its value
            (such as ``forget_prob: 20``): an early-stopping rule, off by default.  A value
            ``retrain`` stops at Retrain's value or below it, as MUSE chooses its checkpoints.
            ``goal`` takes the values that the benchmark's goals have on Original.
        average: How losses per position become one: ``samples``, a mean over samples of means over
            their positions; ``tokens``, a mean over all positions of a micro-batch.  NegGrad+,
            SCRUB, Bad Teacher, SFR-on, RFE and OrthoGrad's retain loss are means over samples
            whatever this says.
    """

    later: ClassVar[Mapping[str, Any]] = LATER

    steps: Count | None = None
    epochs: Count | None = None
    epochs_of: str | None = None
    timing: Literal["own", "transformers"] = "own"
    batch_size: Count = 64
    optimizer: Optimizer = "adamw"
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    eps: Positive = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Amount = 0
    warmup_epochs: Positive | None = None
    accumulation: Count = 1
    max_grad_norm: Positive | None = None
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    loss_cap: Positive = 1e4
    checkpoint_every: Count | Minutes = 500
    log_every: Count = 10
    probe_every: Amount = 0
    evaluate_every: Amount = 0
    evaluate_epochs: Count | None = None
    min_epochs: Count | None = None
    stop_below: Limits = {}
    average: Literal["samples", "tokens"] = "samples"
    lr_of: dict[str, Positive] = {}

    @classmethod
    def of(cls, config: BaseModel, **changes: Any) -> FitConfig:
        """The fields of a training run out of a larger config, with some of them changed.

        Raises:
            ConfigError: They do not go together, such as a warm-up and a shorter length.
        """
        fields = {n: getattr(config, n) for n in FitConfig.model_fields}
        if not (fields["evaluate_every"] or fields["evaluate_epochs"]):
            # what a method measures after the training stops no training
            fields["stop_below"] = {}
        return validate(FitConfig, fields | changes, "one of the method's trainings")

    def for_adapters(self, slope: float) -> FitConfig:
        """The rate of the factors at which an adapter makes the same first step in weight space.

        Args:
            slope: Of dW in the factors' product (:attr:`AdapterConfig.slope`), which Adam's step
                is multiplied with once and that of SGD twice.
        """
        power = 2 if self.optimizer == "sgd" else 1
        return self.model_copy(update={"lr": self.lr / slope**power})

    def briefly(self, steps: int, batch_size: int, lr: float | None) -> FitConfig:
        """The same training for a few steps, at one rate; its own where ``lr`` is None."""
        changes = {
            "steps": steps,
            "epochs": None,
            "batch_size": batch_size,
            "lr": lr or self.lr,
            "schedule": "constant",
            "warmup_steps": 0,
            "warmup_epochs": None,
            "timing": "own",
            "epochs_of": None,
            "accumulation": 1,
            "probe_every": 0,
            "log_every": steps,
        }
        return self.model_copy(update=changes)

    @property
    def evaluates(self) -> bool:
        """Whether the model is measured on the way."""
        return bool(self.evaluate_every or self.evaluate_epochs)

    @property
    def micro_batch(self) -> int:
        """Samples per forward and per named loader."""
        return self.batch_size // self.accumulation

    def left_out(self) -> set[str]:
        """Besides the later fields ``epochs_of``, where nothing is given in epochs."""
        left_out = super().left_out()
        counted = self.epochs_of is not None and any(getattr(self, key) for key in COUNTED)
        return left_out if counted else left_out | {"epochs_of"}

    @model_validator(mode="before")
    @classmethod
    def _one_replaces_the_default_of_the_other(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("epochs") and "steps" not in data:
            return {**data, "steps": None}
        if isinstance(data, dict) and data.get("steps") and "epochs" not in data:
            return {**data, "epochs": None}
        return data

    @model_validator(mode="after")
    def _one_length(self) -> FitConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.evaluate_every and self.evaluate_epochs:
            raise ValueError("give evaluate_every or evaluate_epochs, not both")
        if self.stop_below and not self.evaluates:
            raise ValueError("stop_below needs evaluate_every or evaluate_epochs")
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError("give warmup_steps or warmup_epochs, not both")
        in_steps = self.steps is not None and self.warmup_steps >= self.steps
        if in_steps or (self.epochs is not None and (self.warmup_epochs or 0) >= self.epochs):
            raise ValueError("the warm-up is as long as the run; give it fewer steps")
        if self.batch_size % self.accumulation:
            raise ValueError("accumulation must divide batch_size")
        return self


def total_steps(config: FitConfig, loaders: Mapping[str, data.Loader]) -> int:
    """Optimizer steps of a run."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return steps_in(config, config.epochs, loaders)


def warmup_steps(config: FitConfig, loaders: Mapping[str, data.Loader]) -> int:
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


def evaluation_steps(config: FitConfig, loaders: Mapping[str, data.Loader]) -> tuple[int, int]:
    """(steps between evaluations, 0 for none; steps before which none of them stops the run)."""
    if config.evaluate_epochs is None and config.min_epochs is None:
        return config.evaluate_every, 0
    epoch = steps_in(config, 1, loaders)
    every = config.evaluate_every or epoch * (config.evaluate_epochs or 0)
    return every, epoch * (config.min_epochs or 0)


def steps_in(config: FitConfig, epochs: float, loaders: Mapping[str, data.Loader]) -> int:
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
    """Rate of optimizer step ``step`` (from 0): linear warm-up, then the schedule."""
    warmup = config.warmup_steps if warmup is None else warmup
    if step < warmup:
        return config.lr * (step + (config.timing == "own")) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
