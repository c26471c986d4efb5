"""Passes over data outside training: gradients, squared gradients and errors at fixed weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from common.errors import DataError
from common.loading import Batch, ordered_batches
from common.objectives import sample_cross_entropy

if TYPE_CHECKING:
    from common.methods import UnlearnTask

EVALUATION_BATCH = 256


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def one_pass(task: UnlearnTask, *parts: str, batch_size: int) -> Iterator[Batch]:
    """Every sample of the parts once: shuffled by the task's seed, without augmentation."""
    loader = task.loader(*parts, batch_size=batch_size, augment=False)
    return (loader.next() for _ in range(loader.batches_per_epoch))


def summed_gradients(
    task: UnlearnTask, batches: Iterable[Batch], *, power: int = 1
) -> dict[str, Tensor]:
    """Sum over batches of (gradient of the batch's mean cross-entropy) ** power, in eval mode.

    Args:
        task: Its model's trainable parameters are differentiated.
        batches: Any batches.
        power: 1 or 2.

    Returns:
        Parameter name -> tensor of the parameter's shape; zeros where nothing flows.
    """
    model = task.model
    names, parameters = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    with evaluating(model):
        for batch in batches:
            loss = sample_cross_entropy(task.forward(model, batch), batch.labels).mean()
            for total, grad in zip(
                sums, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if grad is not None:
                    total.add_(grad.pow(power))
    return dict(zip(names, sums, strict=True))


def batch_fisher(task: UnlearnTask, *parts: str, batch_size: int) -> dict[str, Tensor]:
    """Mean over batches of (gradient of the batch's mean cross-entropy)^2, in eval mode.

    Not the Fisher diagonal of single samples: the batch size matters.

    Returns:
        Name of each trainable parameter -> tensor of its shape.
    """
    samples = len(task.indices(*parts))
    batches = math.ceil(samples / min(batch_size, samples))
    sums = summed_gradients(task, one_pass(task, *parts, batch_size=batch_size), power=2)
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
    batches = ordered_batches(task.source, task.indices(*parts), EVALUATION_BATCH)
    labels = [batch.labels.cpu() for batch in batches]
    if labels[0].ndim != 1:
        raise DataError("this method compares classes: samples need one label; choose another")
    return torch.cat(labels)
