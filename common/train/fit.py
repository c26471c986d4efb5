"""The one training loop, and the one importer of accelerate.

:func:`fit` trains whatever requires gradients, on whatever an objective makes of named batches.
Training Original, Retrain and every gradient-based unlearning method go through it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from common.base.config import did_you_mean
from common.base.errors import ConfigError
from common.data.loader import Loader
from common.objectives.objectives import Objective
from common.train.config import FitConfig
from common.train.loop import _Run
from common.train.protocols import AfterStep, FitResult, ModelForward, ScalarSink, Stateful, Watch


def fit(
    model: nn.Module,
    objective: Objective,
    loaders: Mapping[str, Loader],
    config: FitConfig,
    *,
    forward: ModelForward,
    seed: int,
    tracker: ScalarSink | None = None,
    after_step: Sequence[AfterStep] = (),
    penalty: Callable[[nn.Module], Tensor] | None = None,
    checkpoint: Path | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    component_of: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    watch: Watch | None = None,
) -> FitResult:
    """Trains ``model`` in place.

    Args:
        model: Its parameters that require gradients are trained.
        objective: Makes a loss of named batches.
        loaders: One stream per part that the objective reads.
        config: Length, optimizer, precision.
        forward: (model, batch) -> logits.
        seed: Seeds torch's global stream (dropout) for the duration of the run only.
        tracker: Receives losses, norms and adapter statistics.
        after_step: Called with the model after each optimizer step (projections); may return
            scalars to log.
        penalty: Added to the objective, a function of the model's parameters.
        checkpoint: File for mid-run checkpoints; an existing one is resumed.
        stateful: Further states to keep in checkpoints, by name.
        component_of: Parameter name -> component, for norms.
        progress: Called with (steps done, steps in all).
        watch: Evaluates the model every ``config.evaluate_every`` steps and at the last one; what
            it returns is logged as ``evaluation/<metric>``.

    Raises:
        Diverged: A loss became non-finite or larger than ``config.loss_cap``, or a parameter
            ended non-finite.
        CheckpointError: The checkpoint is damaged or of another run.

    Logged at step 1, every ``config.log_every`` steps and at the last: ``loss/<part>``, ``lr``,
    ``grad_norm/<c>`` (before clipping) and ``weight_norm/<c>`` of what is trained, per component
    (``A`` and ``B`` for factors); ``logits/mean``, ``logits/spread``; ``adapter/*`` (see
    :func:`common.bounded.statistics.adapter_statistics`); at probes also
    ``probe_grad_norm/<c>`` and ``effective_weight_norm/<c>``.
    """
    started = time.perf_counter()
    run = _Run(
        model, objective, loaders, config, forward, penalty, component_of, stateful or {}, seed
    )
    model.train()
    with _seeded(seed, run.accelerator.device), contextlib.closing(run), run.splitting():
        first = run.resume(checkpoint)
        for step in range(first, run.total):
            scalars = run.step(step)
            if after_step:
                with run.whole():
                    for hook in after_step:
                        scalars.update(hook(model) or {})
            saves = checkpoint is not None and run.saves(step)
            run.guard(step, sync=saves)
            if run.logs(step):
                scalars.update(run.measure(step))
                run.note(scalars)
                if tracker is not None and run.accelerator.is_main_process:
                    tracker.scalars(step + 1, scalars)
            if checkpoint is not None and saves:
                run.save(checkpoint, step + 1)
            if progress:
                progress(step + 1, run.total)
            if watch is not None and run.evaluates(step):
                metrics = run.evaluate(watch, step, tracker)
                if config.stop_below and below(metrics, config.stop_below):
                    run.total = step + 1
                    break
        run.guard(run.total - 1, final=True)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return FitResult(run.total, time.perf_counter() - started, run.last, run.peak)


def below(metrics: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    """Whether every named metric is known and below its limit.

    Raises:
        ConfigError: A name is none of the metrics.
    """
    for name in limits:
        if name not in metrics:
            raise ConfigError(
                f"stop_below: '{name}' is not measured{did_you_mean(name, [*metrics])}"
            )
    values = [metrics[name] for name in limits]
    return all(v is not None and v < limits[n] for n, v in zip(limits, values, strict=True))


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
