"""A user's image classifier and images: what differs from text in an application."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.base.errors import CheckpointError, DataError
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.protocol.subject import Application, Subject, first_of
from stable_forgetting.common.store.weights import WEIGHTS
from stable_forgetting.vision.apply.checkpoint import Checkpoint, read_checkpoint
from stable_forgetting.vision.apply.images import (
    IMAGE,
    Folder,
    Labels,
    check_disjoint,
    list_folder,
    load_images,
    map_labels,
)
from stable_forgetting.vision.apply.preprocessing import Preprocessing
from stable_forgetting.vision.models.family import ImageClassifiers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stable_forgetting.common.base.config import Strict
    from stable_forgetting.common.measure.scores import Scores
    from stable_forgetting.vision.apply.memory import GivenClassifier, Samples

BATCH = 64
SURE = 50.0
"""Percent of the forget images on which a model that has learnt them is right, at least."""


class ImageSubject(ImageClassifiers, Subject):
    """An image classifier, and images in class subfolders or in data sets.

    Files and images of PIL are prepared with timm's evaluation transform for the model, without
    augmentation, and held in memory as uint8 at the model's input size (150 kB each at 224 px).
    Float tensors are taken from their data set as they are, whenever they are needed.
    """

    modality: ClassVar[str] = "vision"
    kind: ClassVar[str] = "images"
    unit: ClassVar[str] = "images"
    form: ClassVar[str] = "a folder of images (CLASS/x.png)"
    options: ClassVar[tuple[str, ...]] = ("arch", "num_classes", "image_size")
    library: ClassVar[str] = "timm"
    pipeline: ClassVar[str] = "image-classification"
    yardstick: ClassVar[str] = "accuracy"
    measures: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy, %",
        "loss": "cross-entropy, nats",
        "membership_auc": "AUC of membership by loss, %",
        "membership_auc_same_classes": "the same, against test images of the same classes",
    }

    def __init__(self, application: Application):
        super().__init__(application)
        model, options = application.model, application.options
        found = None
        if isinstance(model, Path):
            found = read_checkpoint(model, *(options.get(name) for name in self.options))
        self.samples = [_read(given, role) for role, given in application.given.items()]
        check_disjoint(self.samples)
        self.checkpoint: Checkpoint | GivenClassifier = found or _given(model, self.samples)

    @classmethod
    def takes(cls, forget: Any) -> bool:
        """A folder, one that is not there is missed later, by name; or a data set of images."""
        if isinstance(forget, Path):
            return forget.is_dir() or not (forget.exists() or forget.suffix)
        first = first_of(forget)
        if isinstance(first, Mapping):
            return any(name in first for name in IMAGE)
        return isinstance(first, Sequence) and not isinstance(first, str)

    @property
    def scenario(self) -> str | None:
        """``class`` if no forgotten class is retained, ``random`` if one is; None if unknown."""
        classes = {part.role: set(part.classes) for part in self.samples}
        if "retain" not in classes:
            return None
        return "random" if classes["forget"] & classes["retain"] else "class"

    def load(self, device: torch.device, configs: Sequence[Strict]) -> None:
        """Builds the classifier and decodes every image, where the data sets give no tensors."""
        original = self.checkpoint.load()
        self.labels = self._labels()
        self.original = original.to(device).eval()
        if tensors := _tensors(self.samples):
            from stable_forgetting.vision.apply.memory import tensor_source

            self.prepared_for = None
            self.source, self.parts = tensor_source(tensors, device)
            return
        self.prepared_for = Preprocessing.of(original)
        self.source, self.parts = load_images(self.samples, self.labels, self.prepared_for, device)

    def _labels(self) -> Labels:
        folders = [part for part in self.samples if isinstance(part, Folder)]
        if folders:
            return map_labels(self.checkpoint, folders)
        ids = {name: int(name) for part in self.samples for name in part.classes}
        wrong = [label for label in ids.values() if not 0 <= label < self.num_classes]
        if wrong:
            raise DataError(
                f"a label is {wrong[0]}, and the model has {self.num_classes} classes; number them "
                f"from 0 to {self.num_classes - 1}"
            )
        return Labels(ids, "labels of the data sets")

    @property
    def architecture(self) -> str:
        """As the checkpoint says."""
        return self.checkpoint.architecture

    @property
    def num_classes(self) -> int:
        """As the checkpoint says."""
        return self.checkpoint.num_classes

    def measured(self, model: nn.Module, parts: Collection[str] = ()) -> dict[str, Any]:
        """Accuracy, loss and membership of one model.

        Returns:
            Part -> images, accuracy in percent, mean cross-entropy in nats; ``test`` is also split
            into images of forgotten and of other classes.  ``membership_auc``: percent chance that
            a forget image has a lower loss than a test image (50: they cannot be told apart by
            loss); ``membership_auc_same_classes``: against test images of the forgotten classes.
        """
        import numpy as np

        from stable_forgetting.common.data.batch import LabelledSource, ordered_batches
        from stable_forgetting.common.measure.scores import collect

        model.eval()
        scores = {
            name: collect(
                lambda batch: self.forward(model, batch),
                ordered_batches(self.source, ids, BATCH),
                keep_probs=False,
            )
            for name, ids in self.parts.items()
            if not parts or name in parts
        }
        results: dict[str, Any] = {name: _summary(part) for name, part in scores.items()}
        results |= {"membership_auc": None, "membership_auc_same_classes": None}
        if "test" in scores:
            test = scores["test"]
            assert test.labels is not None
            assert isinstance(self.source, LabelledSource)
            same = np.isin(test.labels, self.source.labels_of(self.parts["forget"]))
            results["test_forgotten_classes"] = _summary(test.select(same)) if same.any() else None
            results["test_other_classes"] = _summary(test.select(~same)) if not same.all() else None
            results["membership_auc"] = _auc(scores["forget"], test)
            if same.any():
                results["membership_auc_same_classes"] = _auc(scores["forget"], test.select(same))
        return results

    @property
    def stored_types(self) -> Mapping[str, torch.dtype]:
        """As the checkpoint stores them; the model computes in float32."""
        return self.checkpoint.dtypes

    @property
    def weights(self) -> Path:
        """The file, or what messages say in its place."""
        return self.checkpoint.weights

    def identity(self) -> dict[str, Any]:
        """Model, folders, labels, preprocessing."""
        return {
            "input": {
                "model": self.checkpoint.name,
                "weights_sha256": self.checkpoint.digest,
                "architecture": self.architecture,
                "num_classes": self.checkpoint.num_classes,
            },
            "data": {part.role: part.about() for part in self.samples},
            "labels": {"origin": self.labels.origin, "ids": dict(self.labels.ids)},
            "preprocessing": self.prepared_for and self.prepared_for.describe(),
        }

    def write(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        """``model.safetensors`` in the given types, and ``config.json`` of a timm model."""
        self.checkpoint.write(model, folder)
        return {"weights_sha256": file_digest(folder / WEIGHTS)}

    def doubt(self, before: Mapping[str, Any]) -> str:
        """Wrong on most images: the class folders are probably not the model's classes."""
        share = before["forget"]["accuracy"]
        if share >= SURE:
            return ""
        ids = ", ".join(f"{name}: {label}" for name, label in [*self.labels.ids.items()][:5])
        return (
            f"The given model is right on only {share:.1f} % of the forget images: check the class "
            f"names ({self.labels.origin}; {ids}{', ...' if len(self.labels.ids) > 5 else ''}) and "
            "the preprocessing."
        )

    def outcome(self, statement: Mapping[str, Any]) -> list[str]:
        """What these measurements say, in plain words."""
        before, after = statement["before"], statement["after"]
        lines = [*filter(None, [self.doubt(before)])]
        for part in ("forget", "retain", "test"):
            if part in after:
                was, now = before[part]["accuracy"], after[part]["accuracy"]
                lines.append(f"Accuracy on {part} images went from {was:.1f} % to {now:.1f} %.")
        if after["membership_auc"] is None:
            lines.append(
                "Membership inference was not measured: it needs images that the model never saw "
                "(test)."
            )
            return lines
        kind, key = "a test image", "membership_auc"
        if after["membership_auc_same_classes"] is not None:
            kind, key = "a test image of the same classes", "membership_auc_same_classes"
        lines.append(
            f"By the loss alone, an attack separates a forget image from {kind} with AUC "
            f"{after[key]:.1f} % (before: {before[key]:.1f} %); 50 % is chance, far below 50 % "
            "betrays the forget set as much as far above, and stronger attacks exist."
        )
        if statement["scenario"] == "class" and key == "membership_auc":
            lines.append(
                "Whole classes were forgotten and the test images hold none of them: this AUC "
                "compares different classes and says little about membership."
            )
        return lines


def _read(given: Any, role: str) -> Folder | Samples:
    if isinstance(given, Path):
        return list_folder(given, role)
    from stable_forgetting.vision.apply.memory import read_samples

    return read_samples(given, role)


def _tensors(samples: Sequence[Folder | Samples]) -> list[Samples]:
    """The data sets where all are of tensors; empty where all are images to be prepared.

    Raises:
        DataError: There are both.
    """
    tensors = [part for part in samples if not isinstance(part, Folder) and not part.pictures]
    if tensors and len(tensors) < len(samples):
        raise DataError("some data sets hold tensors and others images; give all in one form")
    return tensors


def _given(model: Any, samples: Sequence[Folder | Samples]) -> GivenClassifier:
    """A classifier in memory.

    Raises:
        CheckpointError: It does not say how an image becomes its input.
    """
    from stable_forgetting.vision.apply.memory import GivenClassifier, width_of

    tensors = _tensors(samples)
    if tensors:
        return GivenClassifier(model, width_of(model, tensors))
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        raise CheckpointError(
            "the model is none of timm's, so how an image becomes its input is unknown; give data "
            "sets of tensors"
        )
    return GivenClassifier(model, model.num_classes)


def _summary(scores: Scores) -> dict[str, float]:
    scores.check_finite()
    loss = float(scores.loss.mean(dtype="float64"))
    return {"images": len(scores), "accuracy": scores.accuracy, "loss": loss}


def _auc(forget: Scores, test: Scores) -> float:
    from stable_forgetting.common.membership.attacks import loss_threshold_attack

    return loss_threshold_attack(forget.loss, test.loss).auc
