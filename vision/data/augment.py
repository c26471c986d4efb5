"""Training augmentation for whole batches.

Random numbers are drawn on the CPU from an explicit generator and only then moved, so the same
seed gives the same crops on every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    corner = torch.randint(0, 2 * padding + 1, (2, count), generator=generator).to(device)
    mirrored = torch.rand(count, generator=generator).to(device) < (0.5 if flip else 0.0)
    rows = corner[0, :, None] + torch.arange(height, device=device)
    columns = corner[1, :, None] + torch.arange(width, device=device)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = F.pad(images, (padding,) * 4) if padding else images
    sample = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
