"""Crop, flip, resize and normalisation of a batch, against torchvision's image by image."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.vision.config import DataConfig
from stable_forgetting.vision.data.source import ImageSource, PreparedImages
from tools.perf.counts import work
from tools.perf.measure import Case, Check, Size, Variant, ViTSize, seeded

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
AUGMENT_SIZES: dict[Size, tuple[int, int]] = {
    "full": (64, 224),
    "quick": (64, 224),
    "tiny": (4, 48),
}
"""Images per batch, and the side in px to which 32 px are resized."""
BATCHED, PIL_LOOP, TENSOR_LOOP = "ours, batched", "torchvision, PIL", "torchvision, tensors"


def augmentation(size: Size) -> Iterator[Case]:
    """Crop, flip, bicubic resize and normalisation of a batch; the peers loop over its images.

    At 64 images of 224 px every intermediate is above the size that glibc maps anew each time, so
    the ratio depends on the allocator (``--steady-malloc``); ``new MB`` does not.
    """
    count, side = AUGMENT_SIZES[size]
    source = random_images(count, ViTSize(), input_size=side)
    ids, stream = torch.arange(count), generator(0, "perf", "augment")
    pictures = _pictures(source)
    from_pil, from_tensor = _torchvision(side, pil=True), _torchvision(side, pil=False)

    def batched() -> Tensor:
        return source.fetch(ids, augment=stream).inputs["x"]

    def pil_loop() -> Tensor:
        return torch.stack([from_pil(picture) for picture in pictures])

    def tensor_loop() -> Tensor:
        return torch.stack([from_tensor(image) for image in source._images])

    runs = {BATCHED: batched, PIL_LOOP: pil_loop, TENSOR_LOOP: tensor_loop}
    variants = [_augment_variant(name, run) for name, run in runs.items()]
    plain = _torchvision(side, pil=False, augment=False)
    without = torch.stack([plain(image) for image in source._images])
    far = float((source.fetch(ids).inputs["x"] - without).abs().max())
    yield Case(
        "augmentation",
        f"crop, flip, resize 32 -> {side} px, normalise, batch {count}; see --steady-malloc",
        variants,
        [(BATCHED, PIL_LOOP), (BATCHED, TENSOR_LOOP)],
        [Check("same pixels without augmentation (largest difference)", far, 1e-4)],
        unit="batch",
        share=0.6,
    )


def random_images(count: int, vit: ViTSize, *, input_size: int | None = None) -> ImageSource:
    """Random images at native size ``vit.image``, as the vision arm holds them."""
    stream = generator(0, "perf", "images")
    shape = (count, vit.channels, vit.image, vit.image)
    images = torch.randint(0, 256, shape, generator=stream, dtype=torch.uint8)
    labels = torch.randint(0, vit.classes, (count,), generator=stream).numpy()
    pools = {"train": np.arange(count), "validation": np.arange(0), "test": np.arange(0)}
    names = tuple(str(c) for c in range(vit.classes))
    config = DataConfig(name="cifar10" if vit.channels == 3 else "digits")
    return ImageSource(
        PreparedImages(images, labels, pools, None, names, "random", "random"),
        config,
        input_size=input_size or vit.image,
        mean=MEAN[: vit.channels],
        std=STD[: vit.channels],
    )


def _augment_variant(name: str, run: Callable[[], Tensor]) -> Variant:
    with seeded():  # torchvision draws from the global stream
        done = work(run)
    return Variant(name, run, {key: done[key] for key in ("new MB", "calls")})


def _pictures(source: ImageSource) -> list:
    from torchvision.transforms.functional import to_pil_image

    return [to_pil_image(image) for image in source._images]


def _torchvision(side: int, *, pil: bool, augment: bool = True) -> Callable[..., Tensor]:
    from torchvision import transforms as T

    resize = T.Resize(side, T.InterpolationMode.BICUBIC, antialias=True)
    to_float = T.ToTensor() if pil else T.ConvertImageDtype(torch.float32)
    random = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()] if augment else []
    # PIL resizes 8-bit pixels; tensors are resized as floats and clamped, as ours are
    pixels = [resize, to_float] if pil else [to_float, resize, T.Lambda(_clamped)]
    return T.Compose([*random, *pixels, T.Normalize(MEAN, STD)])


def _clamped(image: Tensor) -> Tensor:
    return image.clamp(0, 1)
