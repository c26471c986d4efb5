"""Passes over data outside training: gradients, squared gradients and errors at fixed weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.common.data.batch import Batch, Source, class_labels, ordered_batches
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives import positions
from stable_forgetting.common.objectives.positions import sample_cross_entropy
from stable_forgetting.common.objectives.terms import LogLikelihoods, Term
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.telemetry import evaluating

EVALUATION_BATCH = 256


def one_pass(task: UnlearnTask, *parts: str, batch_size: int) -> Iterator[Batch]:
    """Every sample of the parts once: shuffled by the task's seed, without augmentation."""
    loader = task.loader(*parts, batch_size=batch_size, augment=False)
    return (loader.next() for _ in range(loader.batches_per_epoch))


def class_pass(task: UnlearnTask, batch_size: int) -> Iterator[Batch]:
    """Every training sample once, in order: retain class by class, then forget class by class.

    Raises:
        DataError: The samples have no class.
    """
    ordered = []
    for part in ("retain", "forget"):
        indices = task.indices(part)
        labels = class_labels(task.source, indices)
        ordered.append(indices[np.argsort(labels, kind="stable")])
    return ordered_batches(task.source, np.concatenate(ordered), batch_size)


def mean_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Averaged over samples."""
    return sample_cross_entropy(logits, batch.labels).mean()


def squared_norm(logits: Tensor, batch: Batch) -> Tensor:
    """Mean over samples of sum_v z_v^2, on text a mean over the positions that have a label."""
    squares = positions.wide(logits).square().sum(-1)
    return positions.average(squares, batch.labels, "samples")


def summed_gradients(
    task: UnlearnTask,
    batches: Iterable[Batch],
    *,
    power: float | None = None,
    loss: Term = mean_cross_entropy,
) -> dict[str, Tensor]:
    """Sum over batches of the gradient of a loss, in eval mode.

    With ``power`` each entry of a batch's gradient becomes its magnitude to that power first.  The
    sums are float32 or wider: in bfloat16 a sum stops growing after some hundred batches.
    """
    model = task.model
    names, parameters = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )
    sums = [positions.wide(torch.zeros_like(parameter)) for parameter in parameters]
    with evaluating(model):
        for batch in batches:
            value = loss(task.forward(model, batch), batch)
            for total, grad in zip(
                sums, torch.autograd.grad(value, parameters, allow_unused=True), strict=True
            ):
                if grad is not None:
                    grad = positions.wide(grad)
                    total.add_(grad if power is None else grad.abs().pow(power))
    return dict(zip(names, sums, strict=True))


def mean_gradients(
    task: UnlearnTask,
    *parts: str,
    batch_size: int,
    by_class: bool = False,
    power: float | None = None,
    loss: Term = mean_cross_entropy,
) -> dict[str, Tensor]:
    """The mean over batches of what :func:`summed_gradients` adds up.

    With ``power=2`` not the Fisher diagonal of single samples: it matters which share a batch.
    """
    samples = len(task.indices(*parts))
    batches = math.ceil(samples / min(batch_size, samples))
    if by_class:
        read = class_pass(task, batch_size)
    else:
        read = one_pass(task, *parts, batch_size=batch_size)
    sums = summed_gradients(task, read, power=power, loss=loss)
    return {name: total / batches for name, total in sums.items()}


@torch.no_grad()
def wrong(task: UnlearnTask, *parts: str) -> tuple[Tensor, Tensor]:
    """Labels (N,) int64 and errors (N,) bool of ``task.model`` on parts, both on the CPU."""
    labels, errors = [], []
    with evaluating(task.model):
        for batch in ordered_batches(task.source, task.indices(*parts), EVALUATION_BATCH):
            labels.append(batch.labels.cpu())
            errors.append((task.forward(task.model, batch).argmax(-1) != batch.labels).cpu())
    return torch.cat(labels), torch.cat(errors)


def labels_of(task: UnlearnTask, *parts: str) -> Tensor:
    """Labels (N,) int64 of the parts, in ascending order of index, on the CPU.

    Raises:
        DataError: Samples have more than one label each.
    """
    return torch.from_numpy(class_labels(task.source, task.indices(*parts)))


@torch.no_grad()
def reference_likelihoods(
    task: UnlearnTask, indices: np.ndarray, config: FitConfig, source: Source | None = None
) -> LogLikelihoods:
    """One pass of the model as it is now, in eval mode, without augmentation.

    Cheaper than a frozen copy: no second model, and no second forward per step.
    """
    likelihoods = []
    with evaluating(task.model), autocast(task.model, config.mixed_precision):
        for batch in ordered_batches(source or task.source, indices, config.micro_batch):
            likelihoods.append(
                positions.log_likelihood(task.forward(task.model, batch), batch.labels)
            )
    return LogLikelihoods(torch.as_tensor(indices), torch.cat(likelihoods).cpu())


def autocast(model: nn.Module, precision: str) -> torch.autocast:
    """The engine's autocast outside the engine."""
    device = next(model.parameters()).device.type
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device, dtype=dtype, enabled=precision != "no")
