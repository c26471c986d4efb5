"""The same samples in another domain: their entries in another order, or under other names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stable_forgetting.common.data.batch import Batch, Source


class Elsewhere:
    """A source whose samples are moved by one fixed permutation."""

    def __init__(self, source: Source, seed: int):
        self.source, self.seed = source, seed

    @property
    def digest(self) -> str:
        """That of the samples."""
        return self.source.digest

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The samples at ``indices``, moved; labels stay where no name is changed."""
        batch = self.source.fetch(indices, augment=augment)
        renamed: Any = getattr(self.source, "renamed", None)
        if renamed is not None:
            moved: Batch = renamed(batch, self.seed)
            return moved
        inputs = {name: self._shuffled(value) for name, value in batch.inputs.items()}
        return Batch(inputs, batch.labels, batch.indices)

    def _shuffled(self, values: Tensor) -> Tensor:
        """(N, ...) with the entries of every sample in one other order."""
        flat = values.flatten(1)
        stream = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(flat.shape[1], generator=stream).to(flat.device)
        return flat[:, order].view_as(values)
