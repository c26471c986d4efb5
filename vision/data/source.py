"""Images as a source of batches: one index space, one uint8 tensor, everything batched.

The whole (sub)set sits on the device as uint8; a batch is gathered, augmented at native size,
resized to the network's input and normalised there, without a loop over images.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from stable_forgetting.common.base.config import digest as config_digest
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.data.batch import Batch, to_device
from stable_forgetting.common.data.splits import balanced_draw
from stable_forgetting.vision.config import DataConfig
from stable_forgetting.vision.data.augment import crop_flip
from stable_forgetting.vision.data.folders import listing_digest
from stable_forgetting.vision.data.readers import Pool, RawData, read


class InputSpec(NamedTuple):
    """What a model takes: side in px, and mean and std per channel for pixels in [0, 1]."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class PreparedImages:
    """A decoded data set on the CPU: what a source is made from.

    Attributes:
        images: (N, C, H, W) uint8, training images first, then test images.
        labels: (N,) int64.
        pools: ``train``, ``validation`` and ``test``: disjoint sorted int64 indices.
        noise: (N, C, H, W) float16 in units of the normalised image, or None.
        provenance: Where the pixels come from and how they were encoded.
        digest: SHA-256 of pixels, labels, pools and preparation.
    """

    images: Tensor
    labels: np.ndarray
    pools: dict[str, np.ndarray]
    noise: Tensor | None
    class_names: tuple[str, ...]
    provenance: str
    digest: str


class ImageSource:
    """Images of one data set (implements :class:`common.data.batch.Source`).

    Args:
        config: Augmentation settings and the name of the data set.
        device: Where images live and batches are made.

    Attributes:
        labels: (N,) int64, NumPy: label of every index.
        train_pool: What Original may be trained on (before forgetting is decided).
        validation_pool: Drawn from the official training part.
        test_pool: Official test part.
        provenance: Origin and encoding, to be written into records.
        digest: SHA-256 of the content.
    """

    def __init__(
        self,
        prepared: PreparedImages,
        config: DataConfig,
        spec: InputSpec,
        *,
        device: torch.device | str = "cpu",
    ):
        self.name = config.name
        self.config = config
        self.device = torch.device(device)
        self.input_size = spec.size
        self.labels = prepared.labels
        self.class_names = prepared.class_names
        self.provenance = prepared.provenance
        self.digest = prepared.digest
        self.train_pool = prepared.pools["train"]
        self.validation_pool = prepared.pools["validation"]
        self.test_pool = prepared.pools["test"]
        self._images = prepared.images.to(self.device)
        self._targets = torch.from_numpy(prepared.labels).to(self.device)
        self._noise = None if prepared.noise is None else prepared.noise.to(self.device)
        self._mean, self._std = (self._per_channel(values) for values in (spec.mean, spec.std))

    def _per_channel(self, values: Sequence[float]) -> Tensor:
        assert len(values) in (1, self.in_chans), f"{len(values)} values, {self.in_chans} channels"
        column = torch.tensor(values, dtype=torch.float32, device=self.device).view(-1, 1, 1)
        return column.expand(self.in_chans, 1, 1).contiguous()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of classes of the data set, whether or not all are in the subset."""
        return len(self.class_names)

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return self._images.shape[1]

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        """(N,) int64 class of each image."""
        return self.labels[indices].astype(np.int64)

    @property
    def input_bounds(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Normalised black and white, (C, 1, 1) each: what attacks clip to; None under noise."""
        if self._noise is not None:
            return None
        return {"x": (self.blank_inputs["x"], (1 - self._mean) / self._std)}

    @property
    def blank_inputs(self) -> dict[str, Tensor]:
        """Normalised black, (C, 1, 1): what a pixel of value 0 is in an input."""
        return {"x": -self._mean / self._std}

    def fingerprints(self, indices: np.ndarray) -> np.ndarray:
        """(N,) int64 hashes of the pixels at native size, without noise."""
        images = self._images[torch.from_numpy(indices).to(self.device)].cpu().numpy()
        digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images]
        return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)

    def native(self, indices: Tensor) -> Tensor:
        """Images at native size, not normalised: (N, C, H, W) float32, [0, 1] without noise."""
        chosen = to_device(indices, self.device)
        images = self._images[chosen].float().div_(255)
        if self._noise is not None:
            images += self._noise[chosen].float() * self._std
        return images

    def pictures(self, indices: Sequence[int]) -> list[bytes]:
        """PNG files of images at native size, as a reader sees them."""
        files = []
        for image in self.native(torch.as_tensor(indices)).clamp(0, 1):
            pixels = image.mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
            file = io.BytesIO()
            Image.fromarray(pixels.squeeze(-1) if self.in_chans == 1 else pixels).save(file, "PNG")
            files.append(file.getvalue())
        return files

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The images at ``indices`` (N,), int64, CPU.

        With a generator (and ``augment: true``) a random crop and flip at native size are drawn
        from it.  Then come the bicubic resize to the network's input, and normalisation.

        Returns:
            Inputs ``x`` (N, C, S, S) float32 and labels (N,) int64, on the source's device.
        """
        chosen = to_device(indices, self.device)
        images = self.native(chosen)
        if augment is not None and self.config.augment:
            images = crop_flip(
                images, augment, padding=self.config.crop_padding, flip=self.config.flip
            )
        # in place: fresh pages for three more copies of a large batch cost more than the arithmetic
        x = self._resized(images).sub_(self._mean).div_(self._std)
        return Batch({"x": x}, self._targets[chosen], indices)

    def _resized(self, images: Tensor) -> Tensor:
        size = (self.input_size, self.input_size)
        if images.shape[-2:] == size:
            return images
        images = F.interpolate(images, size, mode="bicubic", antialias=True)
        # bicubic overshoots; an image has no such pixels, but noise has no such limits
        return images.clamp_(0, 1) if self._noise is None else images


def load_source(
    config: DataConfig,
    spec: InputSpec,
    *,
    data_root: Path | None = None,
    device: torch.device | str = "cpu",
) -> ImageSource:
    """Opens, decodes and prepares a data set; the same call in one process decodes once.

    A folder whose names, sizes or times changed is read anew.

    Args:
        data_root: Folder of local data sets; CIFAR is downloaded when it is not there.

    Raises:
        DataError: The data is missing, damaged or smaller than the draws.
    """
    root = None if data_root is None else Path(data_root).resolve()
    listing = listing_digest(root / config.folder) if root and config.folder else ""
    return _source(config, spec, root, listing, str(device))


@lru_cache(maxsize=4)
def _source(
    config: DataConfig, spec: InputSpec, data_root: Path | None, listing: str, device: str
) -> ImageSource:
    return ImageSource(_prepare(config, data_root, listing), config, spec, device=device)


@lru_cache(maxsize=2)
def _prepare(config: DataConfig, data_root: Path | None, listing: str) -> PreparedImages:
    raw = read(config, data_root)
    training, validation = _training_rows(raw, config)
    test = _test_rows(raw, config)
    rows = np.sort(np.concatenate([training, validation]))
    images = torch.cat([_pixels(raw.train, rows, config), _pixels(raw.test, test, config)])
    labels = np.concatenate([raw.train.labels[rows], raw.test.labels[test]])
    pools = {
        "train": np.searchsorted(rows, training),
        "validation": np.searchsorted(rows, validation),
        "test": len(rows) + np.arange(len(test)),
    }
    pools = {part: np.sort(indices).astype(np.int64) for part, indices in pools.items()}
    return PreparedImages(
        images,
        labels,
        pools,
        _noise(images, config),
        raw.class_names,
        raw.provenance,
        _content_digest(images, labels, pools, config),
    )


def _training_rows(raw: RawData, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to validate on.

    Validation is drawn first: it does not depend on ``train_images``.
    """
    labels, rows = raw.train.labels, np.arange(len(raw.train.labels))
    left = len(rows) - config.validation_images
    if left < (config.train_images or 1):
        raise DataError(
            f"{config.name} has {len(rows)} training images, fewer than validation_images"
            f" {config.validation_images} + train_images {config.train_images or 1}: lower one"
        )
    seed = config.subset_seed
    validation = balanced_draw(rows, labels, config.validation_images, seed, "validation")
    training = np.setdiff1d(rows, validation)
    if config.train_images is not None:
        training = balanced_draw(training, labels, config.train_images, seed, "train")
    return training, validation


def _test_rows(raw: RawData, config: DataConfig) -> np.ndarray:
    labels, rows = raw.test.labels, np.arange(len(raw.test.labels))
    count = len(rows) if config.test_images is None else config.test_images
    if count > len(rows):
        raise DataError(f"{config.name} has {len(rows)} test images: lower test_images {count}")
    return balanced_draw(rows, labels, count, config.subset_seed, "test subset")


def _pixels(pool: Pool, rows: np.ndarray, config: DataConfig) -> Tensor:
    """uint8 (n, C, H, W) of ``rows`` at native size: bilinear, antialiased when it shrinks."""
    images = pool.decode(rows)
    side = config.native_size
    if side is None or images.shape[-2:] == (side, side):
        return images
    size = (side, side)
    chunks = [
        F.interpolate(chunk.float(), size, mode="bilinear", antialias=True).round().clamp(0, 255)
        for chunk in images.split(4096)
    ]
    return torch.cat([chunk.to(torch.uint8) for chunk in chunks])


def _noise(images: Tensor, config: DataConfig) -> Tensor | None:
    if config.noise == 0:
        return None
    stream = generator(config.subset_seed, "pixel noise")
    draw = torch.randn(images.shape, generator=stream)
    return draw.mul_(config.noise).half()


def _content_digest(
    images: Tensor, labels: np.ndarray, pools: dict[str, np.ndarray], config: DataConfig
) -> str:
    state = hashlib.sha256(config_digest(config.preparation()).encode())
    state.update(str(tuple(images.shape)).encode())
    state.update(np.ascontiguousarray(images.numpy()).tobytes())
    state.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())
    for part in ("train", "validation", "test"):
        state.update(np.ascontiguousarray(pools[part], dtype="<i8").tobytes())
        state.update(part.encode())
    return state.hexdigest()
