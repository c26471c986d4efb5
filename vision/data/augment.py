"""Training augmentation of whole batches, and two augmented views of every image.

Random numbers are drawn on the CPU from an explicit generator and only then moved, so the same
seed gives the same crops on every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import Batch, Source, concatenate, to_device


def crop_flip(
    images: Tensor, generator: torch.Generator, *, padding: int, flip: bool = True
) -> Tensor:
    """Random crop of the zero-padded images, then a random horizontal flip.

    Args:
        images: (N, C, H, W), any dtype and device.
        generator: A CPU generator; always advanced by the same amount for the same N.
        padding: Pixels added on each side; 0 leaves the position alone.
        flip: Flip each image with probability 1/2.

    Returns:
        (N, C, H, W), same dtype and device.
    """
    count, channels, height, width = images.shape
    device = images.device
    corner = to_device(torch.randint(0, 2 * padding + 1, (2, count), generator=generator), device)
    mirrored = to_device(torch.rand(count, generator=generator), device) < (0.5 if flip else 0.0)
    rows = corner[0, :, None] + torch.arange(height, device=device)
    columns = corner[1, :, None] + torch.arange(width, device=device)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = F.pad(images, (padding,) * 4) if padding else images
    sample = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


class TwoViews:
    """A source whose batches hold every image twice, augmented independently.

    Both views get the data's own augmentation, then a random shift of the network's input (zero
    padding, which is the mean pixel) and Gaussian noise, all from the loader's generator.

    Args:
        shift: Largest shift in px of the network's input.
        noise: Standard deviation in units of the normalised image.
        plain: Give the images before their views, with the data's own augmentation alone.
    """

    def __init__(self, source: Source, *, shift: int, noise: float, plain: bool = False):
        self.source, self.shift, self.noise, self.plain = source, shift, noise, plain

    @property
    def digest(self) -> str:
        """That of the images."""
        return self.source.digest

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """2N images: the first views of ``indices`` (N,), then the second ones; 3N if ``plain``.

        Raises:
            ConfigError: Both views are the same, so that there is nothing to contrast.
        """
        own = [self.source.fetch(indices, augment=augment)] if self.plain else []
        views = [self._view(self.source.fetch(indices, augment=augment), augment) for _ in "12"]
        first, second = (view.inputs["x"] for view in views)
        if torch.equal(first, second):
            raise ConfigError("the two views are equal: set shift, noise or data.augment")
        return concatenate([*own, *views])

    def _view(self, batch: Batch, stream: torch.Generator | None) -> Batch:
        if stream is None:
            return batch
        x = batch.inputs["x"]
        if self.shift:
            x = crop_flip(x, stream, padding=self.shift, flip=False)
        if self.noise:
            x = x + self.noise * torch.randn(x.shape, generator=stream).to(x)
        return Batch({**batch.inputs, "x": x}, batch.labels, batch.indices)
