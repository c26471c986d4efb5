"""Two views of every image, for contrastive objectives."""

from __future__ import annotations

import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.data.batch import Batch, Source, concatenate
from vision.data.augment import crop_flip


class TwoViews:
    """A source whose batches hold every image twice, augmented independently.

    Both views get the data's own augmentation, then a random shift of the network's input (zero
    padding, which is the mean pixel) and Gaussian noise, all from the loader's generator.

    Args:
        source: Where images come from.
        shift: Largest shift in px of the network's input.
        noise: Standard deviation in units of the normalised image.
    """

    def __init__(self, source: Source, *, shift: int, noise: float):
        self.source, self.shift, self.noise = source, shift, noise

    @property
    def digest(self) -> str:
        """That of the images."""
        return self.source.digest

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """2N images: the first views of ``indices`` (N,), then the second ones.

        Raises:
            ConfigError: Both views are the same, so that there is nothing to contrast.
        """
        views = [self._view(self.source.fetch(indices, augment=augment), augment) for _ in "12"]
        first, second = (view.inputs["x"] for view in views)
        if torch.equal(first, second):
            raise ConfigError("the two views are equal: set shift, noise or data.augment")
        return concatenate(views)

    def _view(self, batch: Batch, stream: torch.Generator | None) -> Batch:
        if stream is None:
            return batch
        x = batch.inputs["x"]
        if self.shift:
            x = crop_flip(x, stream, padding=self.shift, flip=False)
        if self.noise:
            x = x + self.noise * torch.randn(x.shape, generator=stream).to(x)
        return Batch({**batch.inputs, "x": x}, batch.labels, batch.indices)
