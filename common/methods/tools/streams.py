"""Streams of batches that single methods need, and the membership test for mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from stable_forgetting.common.data.batch import Batch, Source
from stable_forgetting.common.data.loader import ChainedLoader


def members_of(indices: np.ndarray) -> Callable[[Batch], Tensor]:
    """Batch -> (N,) bool on the labels' device: which samples belong to an index set."""
    members = torch.as_tensor(indices, dtype=torch.int64)
    return lambda batch: torch.isin(batch.indices, members).to(batch.labels.device)


class Interleaved(ChainedLoader):
    """Batches of several loaders in turn, for ever; a loader may have several turns in a round.

    Args:
        loaders: Whose turn it is, in order.
        repeat: Batches per turn (the micro-batches of one optimizer step).
    """

    @property
    def batches_per_epoch(self) -> int:
        """Batches of as many whole rounds as it takes until every loader has made a pass."""
        turns = {id(loader): self.loaders.count(loader) * self.repeat for loader in self.loaders}
        rounds = max(-(-loader.batches_per_epoch // turns[id(loader)]) for loader in self.loaders)
        return rounds * len(self.loaders) * self.repeat

    @property
    def last_turn(self) -> int:
        """Place of the loader that gave the last batch."""
        return (self.count - 1) // self.repeat % len(self.loaders)

    def next(self) -> Batch:
        """The next batch of the loader whose turn it is."""
        self.count += 1
        return self.loaders[self.last_turn].next()


class WithExtras:
    """A source with further samples of its own at negative indices: -1 - j is the j-th."""

    def __init__(self, inner: Source, inputs: Mapping[str, Tensor], labels: Tensor):
        self.inner, self.inputs, self.labels = inner, dict(inputs), labels

    @property
    def digest(self) -> str:
        """That of the inner source."""
        return self.inner.digest

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """Samples in the order asked for."""
        extra = indices < 0
        if not bool(extra.any()):
            return self.inner.fetch(indices, augment=augment)
        inputs, labels = self.extras(-1 - indices[extra])
        if not bool(extra.all()):
            real = self.inner.fetch(indices[~extra], augment=augment)
            place = torch.cat([torch.where(~extra)[0], torch.where(extra)[0]]).argsort()
            place = place.to(real.labels.device)
            inputs = {k: torch.cat([real.inputs[k], v])[place] for k, v in inputs.items()}
            labels = torch.cat([real.labels, labels])[place]
        return Batch(inputs, labels, indices)

    def extras(self, places: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and labels of the further samples at (N,) places."""
        inputs = {name: values[places] for name, values in self.inputs.items()}
        return inputs, self.labels[places]
