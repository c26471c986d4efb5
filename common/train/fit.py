"""The one training loop.

:func:`fit` trains whatever requires gradients, on whatever an objective makes of named batches.
Training Original, Retrain and every gradient-based unlearning method go through it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.bounded.quantised import is_quantised
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.objectives.objectives import Objective
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.loop import TrainingRun
from stable_forgetting.common.train.optimizer import check_patterns
from stable_forgetting.common.train.precision import as_stored, full_precision
from stable_forgetting.common.train.protocols import FitResult, Hooks, ModelForward, Telemetry
from stable_forgetting.common.train.rehearsal import Ends
from stable_forgetting.common.train.telemetry import fork_rng, has_adapters


def fit(
    model: nn.Module,
    objective: Objective,
    loaders: Mapping[str, Loader],
    config: FitConfig,
    *,
    forward: ModelForward,
    seed: int,
    hooks: Hooks | None = None,
    telemetry: Telemetry | None = None,
    checkpoint: Path | None = None,
    keeps_last: bool = True,
    ends: Ends | None = None,
    lr_scaling: Literal["slope", "none"] = "slope",
) -> FitResult:
    """Trains ``model`` in place.

    Args:
        model: Its parameters that require gradients are trained.
        objective: Makes a loss of named batches.
        loaders: One stream per part that the objective reads.
        config: Length, optimizer, precision.  Training is in :mod:`common.train.precision`'s types.
        forward: (model, batch) -> logits.
        seed: Seeds torch's global stream (dropout) for the duration of the run only.
        hooks: Projections, a penalty, further states, a stop condition.
        telemetry: Who looks: tracker, progress, evaluation in training.
        checkpoint: File for checkpoints; the caller deletes it.  One of this very run is resumed.
        keeps_last: Keep the end as a checkpoint, too, unless the caller stores the weights next.
        ends: In a rehearsal: only first and last steps are taken, and logged; nothing stops it.
        lr_scaling: ``slope``: ``config.lr`` is that of a plain weight, and adapters that are
            trained get it divided by omega * phi'(0) (:meth:`FitConfig.for_adapters`), so that
            every adapter starts with the same step in weight space; ``none`` takes it as it is.

    Returns:
        Its cost and last values; ``stopped`` says what ended it early, if anything did.

    Raises:
        ConfigError: Several slopes at one rate; packed weights alone; ``lr_of`` matches nothing.
        Diverged: A loss left ``config.loss_cap``, or a parameter ended non-finite.

    Logged at step 1, every ``config.log_every`` steps and at the last: ``loss/<part>``, ``lr``,
    ``grad_norm/<c>`` (before clipping) and ``weight_norm/<c>`` of what is trained, per component
    (``A`` and ``B`` for factors); ``logits/mean``, ``logits/spread``; ``adapter/*`` (see
    :func:`common.bounded.statistics.adapter_statistics`); at probes also
    ``probe_grad_norm/<c>`` and ``effective_weight_norm/<c>``.
    """
    hooks, telemetry = hooks or Hooks(), telemetry or Telemetry()
    _check(model, config, {*loaders} & {*hooks.stateful})
    if lr_scaling == "slope":
        config = _for_adapters(model, config)
    with full_precision(model, config) as (config, types):
        hooks = dataclasses.replace(hooks, stop_when=as_stored(hooks.stop_when, types))
        seen = as_stored(telemetry.evaluate_during, types)
        telemetry = dataclasses.replace(telemetry, evaluate_during=seen)
        run = TrainingRun(model, objective, loaders, config, forward, seed, hooks, telemetry, ends)
        model.train()
        with fork_rng(run.device), contextlib.closing(run), run.splitting():
            stopped = run.train(checkpoint, keeps_last=keeps_last)
    last, peak = run.instruments.last, run.instruments.peak
    return FitResult(run.total, run.seconds, last, peak, stopped, run.earlier)


def _check(model: nn.Module, config: FitConfig, kept_twice: set[str]) -> None:
    """Refuses rates for no parameter, and packed weights, whose biases alone would be trained."""
    assert not kept_twice, f"a state has a loader's name: {kept_twice}"
    check_patterns(config, [name for name, _ in model.named_parameters()])
    if any(map(is_quantised, model.modules())) and not has_adapters(model):
        raise ConfigError(
            "the model's weights are quantised: only an adapter is trained on them; give the row "
            "adapter: {mode: split}"
        )


def _for_adapters(model: nn.Module, config: FitConfig) -> FitConfig:
    """The config with the rate of the adapters that are trained; as it is where none are."""
    slopes = {layer.config.slope for _, layer in adapted_layers(model) if layer.A.requires_grad}
    if len(slopes) > 1:
        listed = ", ".join(f"{slope:g}" for slope in sorted(slopes))
        raise ConfigError(
            f"the model's adapters have several slopes ({listed}), and one rate cannot fit all; "
            "train them one after the other, or give lr_scaling='none' and a rate of the factors"
        )
    return config.for_adapters(slopes.pop()) if slopes else config
