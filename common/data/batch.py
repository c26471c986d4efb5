"""Batches and sources: what every modality provides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""The label of a position that counts for nothing."""


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        inputs: What the model's ``forward`` takes, by name; every tensor is batch-first.
        labels: Int64 targets: (N,) for classes, (N, T) with -100 where ignored for sequences.
        indices: (N,) int64, CPU: where the samples sit in the source.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def with_labels(self, labels: Tensor) -> Batch:
        """The same inputs with other labels."""
        return Batch(self.inputs, labels, self.indices)

    def slice(self, start: int, stop: int) -> Batch:
        """Samples ``start`` to ``stop``."""
        inputs = {name: tensor[start:stop] for name, tensor in self.inputs.items()}
        return Batch(inputs, self.labels[start:stop], self.indices[start:stop])


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Batches with equal sample shapes as one."""
    names = batches[0].inputs
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in names}
    labels = torch.cat([batch.labels for batch in batches])
    return Batch(inputs, labels, torch.cat([batch.indices for batch in batches]))


class Source(Protocol):
    """Where samples come from; implemented by each modality."""

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The samples at ``indices`` (int64, CPU), on the source's device.

        With a generator, training augmentation is drawn from it; without, none is applied.
        """


def ordered_batches(source: Source, indices: Any, batch_size: int) -> Iterator[Batch]:
    """Every sample once, in order, without augmentation: for evaluation."""
    ids = torch.as_tensor(np.asarray(indices, dtype=np.int64))
    for start in range(0, len(ids), batch_size):
        yield source.fetch(ids[start : start + batch_size])


Forward = Callable[[Batch], Tensor]
"""Batch -> logits: (N, C) or (N, T, C), aligned with the batch's labels."""
