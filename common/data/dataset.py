"""A torch ``Dataset`` as a source."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stable_forgetting.common.data.batch import Batch, to_device


class DatasetSource:
    """Samples of a map-style dataset of (input, class) pairs; the inputs have one shape.

    Args:
        dataset: Its own transform is applied at every fetch, and is all the augmentation there is.
        device: Where batches go.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device | str = "cpu"):
        self.dataset, self.device = dataset, torch.device(device)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all samples as they come; reads the whole dataset once."""
        state = hashlib.sha256()
        for index in range(len(self.dataset)):  # type: ignore[arg-type]
            x, y = self.dataset[index]
            state.update(torch.as_tensor(x).cpu().contiguous().numpy().tobytes())
            state.update(str(int(y)).encode())
        return state.hexdigest()

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """Inputs under the name ``x``, and int64 labels."""
        pairs = [self.dataset[index] for index in indices.tolist()]
        inputs = torch.stack([torch.as_tensor(x) for x, _ in pairs])
        labels = torch.tensor([int(y) for _, y in pairs])
        moved = {"x": to_device(inputs, self.device)}
        return Batch(moved, to_device(labels, self.device), indices)
