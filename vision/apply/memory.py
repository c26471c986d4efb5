"""A user's classifier and data sets that are in memory: what files are read into otherwise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from stable_forgetting.common.base.errors import DataError, one_line
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.data.batch import DatasetSource
from stable_forgetting.common.protocol.given import first_of
from stable_forgetting.common.store.weights import (
    CONFIG,
    WEIGHTS,
    in_types,
    save_weights,
    weights_digest,
)
from stable_forgetting.vision.apply.images import IMAGE, LABEL, Images, is_picture
from stable_forgetting.vision.apply.sizes import fitting_config
from stable_forgetting.vision.data.decode import depth_problem

HALF = (torch.float16, torch.bfloat16)


def in_float32(model: nn.Module) -> nn.Module:
    """The model itself, or a copy whose tensors in half precision are float32."""
    names = [n for n, tensor in model.state_dict().items() if tensor.dtype in HALF]
    return in_types(model, dict.fromkeys(names, torch.float32))


@dataclass(frozen=True)
class GivenClassifier:
    """A classifier in memory, in the place of a :class:`vision.apply.checkpoint.Checkpoint`.

    Attributes:
        model: Image batch (N, C, H, W) -> logits (N, classes).
        num_classes: Width of the logits.
    """

    model: nn.Module
    num_classes: int
    label_names: ClassVar[None] = None
    revision: ClassVar[None] = None
    weights: ClassVar[Path] = Path("the given model")

    @property
    def architecture(self) -> str:
        """timm's name, or that of the class."""
        return self._timm.get("architecture") or type(self.model).__name__

    name = architecture

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names and tensors."""
        return weights_digest(self.model)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> type of each tensor in half precision."""
        tensors = self.model.state_dict().items()
        return {name: tensor.dtype for name, tensor in tensors if tensor.dtype in HALF}

    @property
    def _timm(self) -> Mapping[str, Any]:
        """What timm says of its own models; empty for others."""
        about = getattr(self.model, "pretrained_cfg", None)
        return about if isinstance(about, dict) else {}

    def load(self) -> nn.Module:
        """As :func:`in_float32`: what files hold is trained in float32 too."""
        return in_float32(self.model)

    def write(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        """``model.safetensors``, and the ``config.json`` of a timm model that it suffices for.

        Returns:
            The digest of the weights.
        """
        save_weights(in_types(model, self.dtypes), folder)
        if self._timm:
            self._write_config(model, folder)
        return {"weights_sha256": file_digest(folder / WEIGHTS)}

    def _write_config(self, model: nn.Module, folder: Path) -> None:
        config = {"architecture": self.architecture, "num_classes": self.num_classes}
        fitting = fitting_config(config, model)
        if fitting is not None:
            about = {key: value for key, value in self._timm.items() if _is_json(value)}
            text = json.dumps({**fitting, "pretrained_cfg": about}, indent=1)
            (folder / CONFIG).write_text(f"{text}\n")


def _is_json(value: Any) -> bool:
    try:
        return bool(json.dumps(value))
    except (TypeError, ValueError):
        return False


class Pairs(Dataset[Any]):
    """A map-style data set as (image, label) pairs, whatever its samples look like.

    Args:
        given: Samples are pairs, or mappings with an image and a label.
        role: For messages.
    """

    def __init__(self, given: Any, role: str):
        self._given, self._role = given, role

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = self._given[index]
        if isinstance(sample, Mapping):
            sample = [self._column(sample, names) for names in (IMAGE, LABEL)]
        if not isinstance(sample, Sequence) or len(sample) != 2:
            raise DataError(f"{self._role}: sample {index} is no pair of an image and a label")
        image, label = sample
        if isinstance(image, torch.Tensor) and image.dtype in HALF:
            image = image.float()
        try:
            number = int(label)
            if not isinstance(label, str) and label != number:
                raise ValueError("a part of a class")
            return image, number
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"{self._role}: sample {index} has the label {label!r}; give the number of its "
                "class, from 0"
            ) from None

    def _column(self, sample: Mapping[str, Any], names: Sequence[str]) -> Any:
        name = next((name for name in names if name in sample), None)
        if name is None:
            raise DataError(
                f"{self._role}: its samples have {', '.join(sample)}, and none of "
                f"{', '.join(names)}; rename the column"
            )
        return sample[name]


def read_samples(given: Any, role: str) -> Images:
    """Labels and hashes of a data set, which is read once.

    Args:
        given: A map-style data set: float tensors as the model takes them (C, H, W), or PIL images.
        role: ``forget``, ``retain`` or ``test``.

    Raises:
        DataError: It is empty, or its samples are not images with labels.
    """
    first_of(given, role)
    pairs = Pairs(given, role)
    labels, hashes = [], []
    size: torch.Size | None = None
    pictures: bool | None = None
    for index in range(len(pairs)):
        image, label = pairs[index]
        pictures = is_picture(image) if pictures is None else pictures
        if is_picture(image) != pictures:
            raise DataError(f"{role}: holds tensors and images of PIL; give all in one form")
        if isinstance(image, torch.Tensor):
            size = size or image.shape
            if image.shape != size:
                found, wanted = (" x ".join(map(str, shape)) for shape in (image.shape, size))
                raise DataError(
                    f"{role}[{index}]: is {found}, and the tensors before it are {wanted}; give "
                    "tensors of one size"
                )
        labels.append(label)
        hashes.append(hashlib.sha256(_bytes(image, f"{role}[{index}]")).hexdigest())
    text = "".join(f"{h} {y}\n" for h, y in zip(hashes, labels, strict=True))
    names = tuple(f"{role}[{index}]" for index in range(len(labels)))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Images(role, tuple(map(str, labels)), names, tuple(hashes), digest, pairs=pairs)


def _bytes(image: Any, where: str) -> bytes:
    if is_picture(image):
        if problem := depth_problem(image):
            raise DataError(f"{where}: {problem}")
        if image.mode in ("P", "PA"):  # its numbers are places in a palette
            image = image.convert("RGBA")
        return repr((image.size, image.mode)).encode() + image.tobytes()
    if not isinstance(image, torch.Tensor) or not image.is_floating_point():
        kind = f"{image.dtype} tensor" if isinstance(image, torch.Tensor) else type(image).__name__
        raise DataError(
            f"{where}: is a {kind}; give float tensors as the model takes them, or PIL images"
        )
    return image.cpu().contiguous().numpy().tobytes()


class LabelledTensors(DatasetSource):
    """Tensors of several data sets one after the other, fetched whenever they are needed.

    Their labels are known.
    """

    def __init__(self, samples: Sequence[Images], device: torch.device):
        super().__init__(ConcatDataset([part.pairs for part in samples]), device)
        self.labels = np.array([int(name) for part in samples for name in part.members])
        self._samples = samples

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the digests of the data sets."""
        text = "".join(part.digest for part in self._samples)
        return hashlib.sha256(text.encode()).hexdigest()

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        """(N,) int64 class of each image."""
        return self.labels[indices]


def width_of(
    model: nn.Module, image: torch.Tensor, where: str, mend: str = "give images as it takes them"
) -> int:
    """Width of the logits that a model gives for an image.

    Args:
        model: A classifier in eval mode.
        image: (C, H, W).
        where: Whose image it is, for messages.
        mend: What to do where the model does not take the image.

    Raises:
        DataError: The model does not take these images, or gives no row of logits but something
            else, such as probabilities.
    """
    place = next(model.parameters(), torch.empty(0)).device
    try:
        with torch.no_grad():
            logits = in_float32(model)(image[None].to(place))
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        size = " x ".join(map(str, image.shape))
        raise DataError(
            f"{where}: the model does not take its images, {size} ({one_line(error)}); {mend}"
        ) from None
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        raise DataError("the model gives no logits (N, classes); wrap it in a module that does")
    if float(logits.min()) >= 0 and abs(float(logits.sum()) - 1) < 1e-3:
        raise DataError("the model gives probabilities, not logits; leave its softmax out")
    return int(logits.shape[1])
