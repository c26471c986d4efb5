"""Configs of image data, models, forgetting scenarios and the whole protocol.

They live apart from the code that uses them because that code needs torch, and listing, planning
and reporting must not wait for torch.  Defaults that depend on the data set are filled in before
validation, so that what is stored and hashed is what runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.numbers import Amount, Count, Depth, NonNegative, Positive
from stable_forgetting.common.protocol.pretraining import Pretraining, TransferConfig
from stable_forgetting.common.train.config import FitConfig

DataName = Literal["digits", "cifar10", "cifar100", "folder"]

CLASS_COUNTS = {"digits": 10, "cifar10": 10, "cifar100": 100}
"""Data set -> classes; those of a folder are its subfolders."""
IMAGE_COUNTS = {"digits": (1797, 0), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000)}
"""Data set -> its official training and test images."""

_DATA_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "native_size": 16,
        "validation_images": 150,
        "test_images": 400,
        "augment": False,
        "flip": False,
        "crop_padding": 1,
    },
    "cifar10": {"validation_images": 5000},
    "cifar100": {"validation_images": 5000},
}

_SCRATCH_DEFAULTS: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 8,
    "dim": 64,
    "depth": 4,
    "heads": 4,
    "mlp_ratio": 4.0,
    "stem": "patch",
    "pool": "token",
}

_STEM_STRIDE = 4


def _filled(data: Any, defaults: Mapping[str, Any]) -> Any:
    return {**defaults, **data} if isinstance(data, Mapping) else data


class DataConfig(Strict):
    """Which images, how many, how prepared.

    Attributes:
        name: ``digits`` (scikit-learn, 10 classes, one channel), CIFAR, or a ``folder`` of images
            in the layout train/CLASS/x.png and test/CLASS/x.png, or CLASS/x.png alone.
        source: Where CIFAR comes from: ``parquet`` files below the data root, the ``torchvision``
            archive, or the ``hub`` of the datasets library.  ``auto`` takes the first that works.
            ``invented`` images of the same number and size are noise around a colour per class.
        image_size: Input side of the network in px; the model's own when absent.
        native_size: Side in px to which images are resized once, antialiased, when they are
            loaded; kept as they are when absent.  Digits: 16 (from 8).  Folders need it.
        train_images: How many of the images left after ``validation_images`` to train on; all
            when absent.
        validation_images: Drawn from the training images, never from the test images.  Digits:
            150, CIFAR: 5000 (10 %), folders: 0.
        test_images: How many test images; all when absent.  Digits and folders without test/
            have no official split: there this many are held out.  Digits: 400.
        subset_seed: Seed of these class-balanced draws.  Not the seed of a run: all runs share
            one data set.
        augment: Random crop and flip in training.  Off for digits.
        crop_padding: Zero padding of the random crop, in px of the native size.
        flip: Random horizontal flip.  Off for digits, whose mirror images are no digits.
        noise: Standard deviation of Gaussian pixel noise in units of the normalised image, drawn
            once per image: labels that can only be memorised.
        folder: Sub-path below the data root (name: folder).
    """

    name: DataName = "digits"
    source: Literal["auto", "parquet", "hub", "torchvision", "invented"] = "auto"
    image_size: Count | None = None
    native_size: Count | None = None
    train_images: Count | None = None
    validation_images: Amount = 0
    test_images: Count | None = None
    subset_seed: int = 0
    augment: bool = True
    crop_padding: Amount = 4
    flip: bool = True
    noise: NonNegative = 0.0
    folder: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_data_set(cls, data: Any) -> Any:
        name = data.get("name", "digits") if isinstance(data, Mapping) else None
        return _filled(data, _DATA_DEFAULTS.get(name, {}) if isinstance(name, str) else {})

    @model_validator(mode="after")
    def _fits_the_data_set(self) -> DataConfig:
        if self.source != "auto" and not self.name.startswith("cifar"):
            raise ValueError(f"source: {self.source} is only for CIFAR; leave it out")
        if (self.name == "folder") != (self.folder is not None):
            raise ValueError("name: folder and folder: SUB-PATH belong together")
        if self.folder is not None:
            path = PurePosixPath(self.folder)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError("folder: must be a path below the data root")
            if self.native_size is None:
                raise ValueError("name: folder needs native_size, the side in px to store")
        if self.name == "digits" and self.test_images is None:
            raise ValueError("digits has no test set of its own: give test_images a number")
        return self

    @property
    def channels(self) -> int:
        """1 where images are grey, else 3."""
        return 1 if self.name == "digits" else 3

    def preparation(self) -> dict[str, Any]:
        """The fields that decide which pixels and pools a source holds."""
        chosen = {"name", "native_size", "train_images", "validation_images", "test_images"}
        return self.model_dump(mode="json", include=chosen | {"subset_seed", "noise", "folder"})


class ModelConfig(Grown):
    """A vision transformer, from timm or small and from scratch.

    Attributes:
        name: ``scratch``, or any timm name such as ``vit_small_patch16_224.augreg_in21k``;
            ``timm/NAME``, its name on the hub, is ``NAME`` with ``pretrained``.
        pretrained: Load timm's weights for that name (with a new head).
        checkpoint: What to load instead: a safetensors file, a folder with one, the folder of a
            PEFT adapter, or ``hf-hub:OWNER/NAME``; or ``package:NAME``, weights that an installed
            package brings (:mod:`vision.models.packages`; with a new head).
        image_size: Input side in px; scratch: 16, timm: its own when absent.
        patch_size: Side of a patch in px (scratch only, as all fields below).
        dim: Width of the transformer.
        depth: Number of blocks.
        heads: Attention heads per block.
        mlp_ratio: Hidden width of the MLP over ``dim``.
        stem: ``patch`` is one linear projection per patch; ``conv`` puts two 3x3 convolutions
            of stride 2 (32 and 64 channels, GroupNorm(8), GELU) before it.
        pool: Classify from the class ``token`` or from the ``avg`` of the patch tokens.
        shrunk: Build timm's architecture narrow and with few blocks: it stands in for the whole
            one in rehearsals.
        frozen_statistics: Batch normalisation keeps the running statistics that were loaded, in
            every training (with ``pretrained`` or ``checkpoint``).
    """

    later = {"shrunk": False, "frozen_statistics": False}
    name: str = "scratch"
    pretrained: bool = False
    checkpoint: str | None = None
    image_size: Count | None = None
    patch_size: Count | None = None
    dim: Count | None = None
    depth: Depth | None = None
    heads: Count | None = None
    mlp_ratio: Positive | None = None
    stem: Literal["patch", "conv"] | None = None
    pool: Literal["token", "avg"] | None = None
    shrunk: bool = False
    frozen_statistics: bool = False

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_scratch(cls, data: Any) -> Any:
        name = data.get("name") if isinstance(data, Mapping) else None
        if isinstance(name, str) and (known := re.fullmatch(r"(hf-hub:)?timm/(.+)", name)):
            own = {} if data.get("checkpoint") else {"pretrained": True}
            return {**own, **data, "name": known[2]}
        scratch = isinstance(data, Mapping) and data.get("name", "scratch") == "scratch"
        return _filled(data, _SCRATCH_DEFAULTS) if scratch else data

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.pretrained and self.checkpoint:
            raise ValueError("give one of pretrained: true and checkpoint")
        if self.name == "scratch":
            return self._check_scratch()
        for field in _SCRATCH_DEFAULTS.keys() - {"image_size"}:
            if getattr(self, field) is not None:
                raise ValueError(f"{field}: only for name: scratch; {self.name} has its own")
        return self

    def _check_scratch(self) -> ModelConfig:
        if self.pretrained:
            raise ValueError("pretrained: name: scratch has no pretrained weights")
        missing = [field for field in _SCRATCH_DEFAULTS if getattr(self, field) is None]
        if missing:
            raise ValueError(f"{missing[0]}: name: scratch needs a value here")
        assert self.image_size and self.patch_size and self.dim and self.heads
        if self.image_size % self.patch_size:
            raise ValueError("image_size must be a multiple of patch_size")
        if self.dim % self.heads:
            raise ValueError("dim must be a multiple of heads")
        if self.stem == "conv" and self.patch_size % _STEM_STRIDE:
            raise ValueError(f"stem: conv needs a patch_size that is a multiple of {_STEM_STRIDE}")
        return self


class ScenarioConfig(Strict):
    """What is forgotten.

    Attributes:
        kind: ``random`` training images; whole ``class``es; the most ``confusing`` or the most
            ``memorised`` training images (by a proxy, see :mod:`vision.scenarios`).
        fraction: Share of the training images (not for ``class``); 0.1 when absent.
        classes: The class ids to forget (only for ``class``).
        num_classes: How many classes to forget, chosen by the seed (only for ``class``, when
            ``classes`` is absent); 1 when absent.
        earlier_classes: Class ids that earlier requests forgot (with ``classes``, in a suite that
            comes ``after`` another).
    """

    kind: Literal["random", "class", "confusing", "memorised"] = "random"
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    classes: tuple[Amount, ...] | None = None
    num_classes: Count | None = None
    earlier_classes: tuple[Amount, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if data.get("kind", "random") != "class":
            return _filled(data, {"fraction": 0.1})
        return _filled(data, {} if data.get("classes") is not None else {"num_classes": 1})

    @model_validator(mode="after")
    def _consistent(self) -> ScenarioConfig:
        if self.earlier_classes and self.classes is None:
            raise ValueError("earlier_classes: give the classes of this request too")
        if set(self.earlier_classes) & set(self.classes or ()):
            raise ValueError("earlier_classes: a class of this request is among them")
        if self.kind != "class":
            if self.classes is not None or self.num_classes is not None:
                raise ValueError(
                    f"classes and num_classes are only for kind: class, not {self.kind}"
                )
            if self.fraction is None:
                raise ValueError(f"fraction: kind: {self.kind} needs a number")
            return self
        if self.fraction is not None:
            raise ValueError("fraction: kind: class forgets whole classes; leave it out")
        if (self.classes is None) == (self.num_classes is None):
            raise ValueError("give one of classes and num_classes")
        if self.classes is not None and len(set(self.classes)) != max(len(self.classes), 1):
            raise ValueError("classes: list each class once, and at least one")
        return self

    @property
    def label(self) -> str:
        """A short name, such as ``class-3``, ``10-classes``, ``random-0.1``."""
        if self.classes is not None:
            return "class-" + "-".join(str(label) for label in self.classes)
        if self.kind == "class":
            return f"{self.num_classes}-classes"
        return f"{self.kind}-{self.fraction}"


class EvaluationConfig(Strict):
    """How models are measured.

    Attributes:
        features: Features of the SVC attacks; the headline MIA is ``confidence``.
        retain_samples: Score at most this many retain images (hash-ordered draw); all when absent.
        batch_size: Images per forward.
    """

    features: tuple[str, ...] = (
        "confidence",
        "correctness",
        "entropy",
        "modified_entropy",
        "probs",
    )
    retain_samples: Count | None = None
    batch_size: Count = 256


class ImagePretraining(Pretraining):
    """A pretraining on other images; its classes are those of the data, and its head is dropped.

    Attributes:
        data: Which images; all held-out test images measure it.
    """

    data: DataConfig


class VisionConfig(TransferConfig):
    """One vision protocol.

    Attributes:
        data: Which images.
        model: Which classifier.
        scenario: What is forgotten.
        train: Recipe of Original and Retrain.
        evaluation: How models are measured.
        minimum_train_accuracy: An Original below this (percent) is not unlearned.
        pretrain: A training on other images that Original and Retrain start from; it stands in the
            place of ``model.pretrained`` and ``model.checkpoint``.
    """

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    scenario: ScenarioConfig = ScenarioConfig()
    train: FitConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    minimum_train_accuracy: Annotated[float, Field(ge=0, le=100)] = 95.0
    pretrain: ImagePretraining | None = None

    @model_validator(mode="after")
    def _one_start_on_other_data(self) -> VisionConfig:
        if self.pretrain is None:
            return self
        if self.model.pretrained or self.model.checkpoint:
            raise ValueError("give one of pretrain, model.pretrained and model.checkpoint")
        own, other = self.data, self.pretrain.data
        if (own.name, own.folder) == (other.name, other.folder):
            raise ValueError(
                f"pretrain.data: {own.folder or own.name} is what the suite learns and forgets; "
                "pretrain on other images"
            )
        if (own.channels, own.native_size) != (other.channels, other.native_size):
            raise ValueError("pretrain.data: needs the channels and the native_size of data")
        return self
