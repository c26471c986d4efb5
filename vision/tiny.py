"""The tiny problem of vision methods: 16 x 16 px images of four classes and a small ViT."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.checks.tiny_task import (
    CLASSES,
    PER_CLASS,
    TinyProblem,
)
from stable_forgetting.common.store.weights import tensors_digest
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.vision.config import DataConfig, ModelConfig
from stable_forgetting.vision.data.source import ImageSource, InputSpec, PreparedImages
from stable_forgetting.vision.models.build import build_model
from stable_forgetting.vision.models.family import VIT

SIDE = 16
_MODEL = ModelConfig(patch_size=4, dim=16, depth=2, heads=2, mlp_ratio=2.0)


@functools.cache
def _prepared() -> PreparedImages:
    stream = generator(0, "checks", "images")
    labels = np.arange(CLASSES * PER_CLASS) % CLASSES
    like: Any = {"generator": stream, "dtype": torch.float32}  # whatever the default is just now
    centres = 0.4 * torch.rand(CLASSES, 1, 4, 4, **like)
    centres += 0.2 * torch.arange(CLASSES).view(-1, 1, 1, 1)  # darker and brighter classes
    bright = torch.nn.functional.interpolate(centres[labels], SIDE, mode="nearest")
    noise = 0.2 * torch.randn(bright.shape, **like)
    images = (255 * (bright + noise).clamp(0, 1)).to(torch.uint8)
    everything = np.arange(len(labels))
    pools = {"train": everything[:96], "validation": everything[96:120], "test": everything[120:]}
    digest = tensors_digest({"images": images, "labels": torch.from_numpy(labels)})
    names = tuple(f"class {label}" for label in range(CLASSES))
    return PreparedImages(images, labels, pools, None, names, "drawn from a seed", digest)


class GreyImages(ImageSource):
    """Grey labelled images, augmented by crops."""

    def __init__(self) -> None:
        config = DataConfig(augment=True, flip=False, crop_padding=1)
        super().__init__(_prepared(), config, InputSpec(SIDE, (0.3,), (0.35,)))


class TinyImages(TinyProblem):
    """Images and a vision transformer with a class token and 16 patches."""

    recipe: ClassVar[FitConfig] = FitConfig(epochs=10, batch_size=16, lr=5e-3)
    family = VIT

    def source(self) -> ImageSource:
        """Labelled images."""
        return GreyImages()

    def net(self) -> nn.Module:
        """An untrained transformer."""
        return build_model(_MODEL, num_classes=CLASSES, in_chans=1, generator_seed=0)
