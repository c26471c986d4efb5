"""Encoded images -> pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from stable_forgetting.common.base.errors import DataError, one_line


def encoding(data: bytes) -> str:
    """Name of the image format, from the first bytes."""
    if data[:2] == b"\xff\xd8":
        return "JPEG"
    if data[:4] == b"\x89PNG":
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return "other format"


def depth_problem(image: Image.Image) -> str:
    """What is wrong with more than 8 bits a channel, which PIL would clip; empty if nothing is."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;"):
        return ""
    return (
        f"has pixels of mode {image.mode}, more than 8 bits; save it as 8-bit, scaled as its "
        "values ask"
    )


def decoded(file: Any, mode: str) -> Image.Image:
    """An encoded image, a path or a stream of bytes, in PIL's mode ``RGB`` or ``L``.

    Raises:
        DataError: It cannot be decoded, or has more than 8 bits a channel, which PIL would clip.
    """
    try:
        with Image.open(file) as image:
            problem = depth_problem(image)
            pixels = image if problem else image.convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot be decoded ({one_line(error)}); replace or remove it") from None
    if problem:
        raise DataError(problem)
    return pixels


def decode_all(files: Sequence[Any], origin: str, size: int | None = None) -> Tensor:
    """Encoded bytes or paths -> uint8 RGB (n, 3, H, W); ``size`` crops centrally and resizes."""
    pixels = []
    for number, file in enumerate(files):
        try:
            rgb = decoded(io.BytesIO(file) if isinstance(file, bytes) else file, "RGB")
        except DataError as error:
            name = f"image {number}" if isinstance(file, bytes) else str(file)
            raise DataError(f"{origin}: {name} {error}") from None
        rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC) if size else rgb
        pixels.append(np.asarray(rgb))
        if pixels[-1].shape != pixels[0].shape:
            raise DataError(f"{origin}: images differ in size; use name: folder with native_size")
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
