"""A user's image classifier and images as a benchmark without Retrain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import CheckpointError, DataError
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.membership.attacks import loss_threshold_attack
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.protocol.given import Application, GivenBenchmark, first_of
from stable_forgetting.vision.apply.checkpoint import Checkpoint, read_checkpoint
from stable_forgetting.vision.apply.images import (
    IMAGE,
    Images,
    Labels,
    check_disjoint,
    list_folder,
    load_images,
    map_labels,
    placed,
)
from stable_forgetting.vision.apply.preprocessing import Preprocessing
from stable_forgetting.vision.models.family import ImageClassifiers

if TYPE_CHECKING:
    import torch

    from stable_forgetting.common.data.batch import Source
    from stable_forgetting.vision.apply.memory import GivenClassifier

SURE = {"forget": 50.0, "retain": 50.0, "test": 25.0}
"""Role -> percent of its images on which a model that has learnt the classes is right, at least."""


class GivenImages(ImageClassifiers, GivenBenchmark):
    """An image classifier, and images in class subfolders or in data sets.

    Files and images of PIL are prepared with timm's evaluation transform for the model, without
    augmentation, and held in memory as uint8 at the model's input size (150 kB each at 224 px).
    Float tensors are taken from their data set as they are, whenever they are needed.
    """

    modality: ClassVar[str] = "vision"
    kind: ClassVar[str] = "images"
    unit: ClassVar[str] = "images"
    form: ClassVar[str] = "a folder of images (CLASS/x.png)"
    options: ClassVar[tuple[str, ...]] = ("arch", "image_size")
    card: ClassVar[Mapping[str, str]] = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
    }
    yardstick: ClassVar[str] = "accuracy"
    metrics: ClassVar[tuple[MetricSpec, ...]] = (
        MetricSpec("accuracy", "target", "accuracy"),
        MetricSpec("loss", "target", "cross-entropy", "nats"),
        MetricSpec("membership_auc", "target", "AUC of membership by loss"),
        MetricSpec(
            "membership_auc_same_classes",
            "target",
            "the same, against test images of the same classes",
            unit="",
        ),
    )

    _source: Source

    def __init__(self, config: Application, runtime: Runtime):
        super().__init__(config, runtime)
        application = config
        model, options = application.model, application.options
        found = None
        if isinstance(model, Path):
            found = read_checkpoint(model, *(options.get(name) for name in self.options))
        self.images = [_read(given, role) for role, given in application.given.items()]
        if len({part.root is None for part in self.images}) > 1:
            raise DataError("some images lie in folders and others in memory; give all in one form")
        check_disjoint(self.images)
        self.given: Checkpoint | GivenClassifier = found or _given(model, self.images)

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
    def scenario(self) -> str:
        """``class`` if no forgotten class is retained, ``random`` if one is; empty if unknown."""
        classes = {part.role: set(part.classes) for part in self.images}
        if "retain" not in classes:
            return ""
        return "random" if classes["forget"] & classes["retain"] else "class"

    def prepare(self, device: torch.device, configs: Sequence[Strict]) -> None:
        """Builds the classifier and decodes every image, where the data sets give no tensors."""
        original = self.given.load()
        self.labels = self._labels()
        self.original = original.to(device).eval()
        self.samples = placed(self.images)
        if _of_tensors(self.images):
            from stable_forgetting.vision.apply.memory import LabelledTensors

            self.prepared_for = None
            self._source = LabelledTensors(self.images, device)
            return
        self.prepared_for = Preprocessing.of(original)
        self._source = load_images(self.images, self.labels, self.prepared_for, device)

    @property
    def source(self) -> Source:
        """The images."""
        return self._source

    @property
    def evaluation_batch(self) -> int:
        """Images per forward in evaluation."""
        return 64

    def _labels(self) -> Labels:
        folders = [part for part in self.images if part.root is not None]
        if folders:
            return map_labels(self.given, folders)
        names = (name for part in self.images for name in sorted(part.classes, key=int))
        ids = {name: int(name) for name in names}
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
        return self.given.architecture

    @property
    def num_classes(self) -> int:
        """As the checkpoint says."""
        return self.given.num_classes

    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """Accuracy, loss and membership of one model.

        Returns:
            Of each part ``part.images``, ``part.accuracy`` in percent and ``part.loss``, the mean
            cross-entropy in nats; ``test`` is also split into images of forgotten and of other
            classes.  ``membership_auc``: percent chance that a forget image has a lower loss than a
            test image (50: they cannot be told apart by loss); ``membership_auc_same_classes``:
            against test images of the forgotten classes.
        """
        results: dict[str, float | None] = {}
        for name, part in scores.items():
            results |= _summary(name, part)
        results |= {"membership_auc": None, "membership_auc_same_classes": None}
        if "test" in scores:
            forget, test = scores["forget"], scores["test"]
            assert test.labels is not None and forget.labels is not None
            same = np.isin(test.labels, forget.labels)
            results |= _summary("test_forgotten_classes", test.select(same))
            results |= _summary("test_other_classes", test.select(~same))
            results["membership_auc"] = _auc(forget, test)
            if same.any():
                results["membership_auc_same_classes"] = _auc(forget, test.select(same))
        return results

    def about(self) -> dict[str, Any]:
        """Model, folders, labels, preprocessing."""
        return {
            "input": {
                "model": self.given.name,
                "weights_sha256": self.given.digest,
                "revision": self.given.revision,
                "architecture": self.architecture,
                "num_classes": self.num_classes,
            },
            "data": {part.role: part.about() for part in self.images},
            "labels": {"origin": self.labels.origin, "ids": dict(self.labels.ids)},
            "preprocessing": self.prepared_for and self.prepared_for.describe(),
        }

    def doubt(self, before: Mapping[str, Any]) -> str:
        """Right on too few images: the class folders are probably not the model's classes."""
        right = {part: before[part]["accuracy"] for part in SURE if part in before}
        part = next((part for part, share in right.items() if share < SURE[part]), None)
        if part is None:
            return ""
        ids = ", ".join(f"{name}: {label}" for name, label in [*self.labels.ids.items()][:5])
        ids += ", ..." if len(self.labels.ids) > 5 else ""
        where = "" if self.prepared_for is None else " (pretrained_cfg of the model's config)"
        return (
            f"The given model is right on only {right[part]:.1f} % of the {part} images: check the "
            f"class names ({self.labels.origin}; {ids}) and the preprocessing{where}."
        )

    def outcome(self, statement: Mapping[str, Any]) -> list[str]:
        """What these measurements say, in plain words."""
        before, after = statement["before"], statement["after"]
        lines = [*filter(None, [self.doubt(before)])]
        if self.prepared_for is not None:
            lines.append(self.prepared_for.said())
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


def _read(given: Any, role: str) -> Images:
    if isinstance(given, Path):
        return list_folder(given, role)
    from stable_forgetting.vision.apply.memory import read_samples

    return read_samples(given, role)


def _of_tensors(images: Sequence[Images]) -> bool:
    """Whether all data sets are of tensors; False where all are images to be prepared."""
    tensors = [part.tensors for part in images]
    if any(tensors) and not all(tensors):
        raise DataError("some data sets hold tensors and others images; give all in one form")
    return all(tensors)


def _given(model: Any, images: Sequence[Images]) -> GivenClassifier:
    """A classifier in memory."""
    from stable_forgetting.vision.apply.memory import GivenClassifier, width_of

    if _of_tensors(images):
        return GivenClassifier(model, width_of(model, images[0].pairs[0][0], images[0].role))
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        raise CheckpointError(
            "the model is none of timm's, so how an image becomes its input is unknown; give data "
            "sets of tensors"
        )
    return GivenClassifier(model, model.num_classes)


def _summary(name: str, scores: Scores) -> dict[str, float | None]:
    """Of the images of a part; the name alone where there are none."""
    if not len(scores):
        return {name: None}
    scores.check_finite()
    loss = float(scores.loss.mean(dtype="float64"))
    values = {"images": len(scores), "accuracy": scores.accuracy, "loss": loss}
    return {f"{name}.{key}": value for key, value in values.items()}


def _auc(forget: Scores, test: Scores) -> float | None:
    return loss_threshold_attack(forget.loss, test.loss)["mia_auc"]
