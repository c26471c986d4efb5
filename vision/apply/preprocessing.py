"""How an image becomes the input of a timm model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.errors import CheckpointError, DataError

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the model's input: timm's evaluation transform.

    Attributes:
        size: Input side in px.
        channels: 3 (RGB) or 1 (grey).
        mean: Per channel, for pixels in [0, 1].
        std: Per channel, for pixels in [0, 1].
        interpolation: Of the resize.
        crop_pct: Share of the resized image that the central crop keeps.
        crop_mode: timm's name of the crop.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: str

    @classmethod
    def of(cls, model: nn.Module) -> Preprocessing:
        """What timm's data config says of a built model.

        Raises:
            CheckpointError: The model takes something other than square RGB or grey images, or its
                config does not say how to make them.
        """
        from timm.data import resolve_model_data_config

        expected = resolve_model_data_config(model)
        try:
            own = getattr(getattr(model, "patch_embed", None), "img_size", None)
            height, width = map(int, own or expected["input_size"][-2:])
        except (TypeError, ValueError):
            raise CheckpointError(
                f"pretrained_cfg: input_size {expected['input_size']} must be channels, height and "
                "width; correct the config"
            ) from None
        channels = _input_channels(model)
        if height != width or height < 1 or channels not in (1, 3):
            raise CheckpointError(
                f"the model takes {channels} x {height} x {width}; only square RGB or grey images "
                "can be applied"
            )
        try:
            mean, std = (tuple(float(value) for value in expected[key]) for key in ("mean", "std"))
            share = float(expected["crop_pct"])
        except (TypeError, ValueError):
            raise CheckpointError(
                "pretrained_cfg: mean, std and crop_pct must be numbers; correct the config"
            ) from None
        if not (mean and std and min(std) > 0 and 0.1 <= share <= 2):
            raise CheckpointError(
                f"pretrained_cfg: std {std} must be above 0 and crop_pct {share:g} between 0.1 and "
                "2; correct the config"
            )
        if len(mean) != channels:
            mean, std = ((sum(values) / len(values),) * channels for values in (mean, std))
        crop = (expected["interpolation"], share, expected["crop_mode"])
        made = cls(height, channels, mean, std, *crop)
        try:
            _ = made._transform
        except KeyError:
            raise CheckpointError(
                f"pretrained_cfg: timm knows no interpolation {made.interpolation}; correct the "
                "config"
            ) from None
        return made

    def decode(self, file: Path) -> torch.Tensor:
        """One image file as (channels, size, size) uint8.

        Raises:
            DataError: The file cannot be decoded.
        """
        from stable_forgetting.vision.data.decode import decoded

        try:
            pixels = decoded(file, "RGB" if self.channels == 3 else "L")
        except DataError as error:
            raise DataError(f"{file}: {error}") from None
        return self._transform(pixels)

    def convert(self, picture: Any) -> torch.Tensor:
        """One image of PIL as (channels, size, size) uint8."""
        return self._transform(picture.convert("RGB" if self.channels == 3 else "L"))

    def describe(self) -> dict[str, Any]:
        """For the statement."""
        return {**dataclasses.asdict(self), "augmentation": "none"}

    def said(self) -> str:
        """For a reader: what a model that was trained on other images would show."""
        mean, std = (", ".join(f"{value:g}" for value in each) for each in (self.mean, self.std))
        return (
            f"Images were prepared as the model's config says: {self.size} px, "
            f"{self.interpolation}, crop_pct {self.crop_pct:g} ({self.crop_mode}), mean {mean}, "
            f"std {std}. A model trained on images prepared otherwise measures too low here."
        )

    @cached_property
    def _transform(self) -> Any:
        from timm.data import create_transform

        return create_transform(
            (self.channels, self.size, self.size),
            is_training=False,
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            normalize=False,
        )


def _input_channels(model: nn.Module) -> int:
    from torch import nn

    first: Any = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    first = first[0] if isinstance(first, list | tuple) else first
    modules = dict(model.named_modules())
    if first in modules and hasattr(modules[first], "weight"):
        return int(modules[first].weight.shape[1])
    convolutions = (module for module in modules.values() if isinstance(module, nn.Conv2d))
    return int(next((conv.weight.shape[1] for conv in convolutions), 3))
