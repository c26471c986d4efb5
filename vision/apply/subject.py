"""A user's timm model and folders of images: what differs from text in an application."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.protocol.subject import Application, Subject
from stable_forgetting.common.store.weights import CONFIG, WEIGHTS, keep_metadata, save_weights
from stable_forgetting.vision.apply.checkpoint import build, read_checkpoint
from stable_forgetting.vision.apply.images import (
    Folder,
    Preprocessing,
    check_disjoint,
    list_folder,
    load_images,
    map_labels,
)
from stable_forgetting.vision.models.family import ImageClassifiers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stable_forgetting.common.base.config import Strict
    from stable_forgetting.common.data.batch import Source
    from stable_forgetting.common.measure.scores import Scores

BATCH = 64
SURE = 50.0
"""Percent of the forget images on which a model that has learnt them is right, at least."""


class ImageSubject(ImageClassifiers, Subject):
    """A timm classifier and images in class subfolders.

    Images are prepared with timm's evaluation transform for the model, without augmentation, and
    held in memory as uint8 at the model's input size (150 kB each at 224 px).
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
        options = application.options
        self.checkpoint = read_checkpoint(
            application.model, *(options.get(name) for name in self.options)
        )
        self.folders = [list_folder(root, role) for role, root in application.given.items()]
        check_disjoint(self.folders)

    @classmethod
    def takes(cls, forget: Path) -> bool:
        """A folder; one that is not there is missed later, by name."""
        return forget.is_dir() or not (forget.exists() or forget.suffix)

    @property
    def scenario(self) -> str | None:
        """``class`` if no forgotten class is retained, ``random`` if one is; None if unknown."""
        classes = {folder.role: set(folder.classes) for folder in self.folders}
        if "retain" not in classes:
            return None
        return "random" if classes["forget"] & classes["retain"] else "class"

    def load(self, device: torch.device, configs: Sequence[Strict]) -> None:
        """Builds the classifier and decodes every image."""
        original = build(self.checkpoint)
        self.labels = map_labels(self.checkpoint, self.folders)
        self.prepared_for = Preprocessing.of(original)
        self.original = original.to(device).eval()
        self.images, self.parts = load_images(self.folders, self.labels, self.prepared_for, device)
        self.source: Source = self.images

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

        from stable_forgetting.common.data.batch import ordered_batches
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
            same = np.isin(test.labels, self.images.labels[self.parts["forget"]])
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
        """The file."""
        return self.checkpoint.weights

    def identity(self) -> dict[str, Any]:
        """Model, folders, labels, preprocessing."""
        return {
            "input": {
                "model": self.application.model.name,
                "weights_sha256": self.checkpoint.digest,
                "architecture": self.architecture,
                "num_classes": self.checkpoint.num_classes,
            },
            "data": {folder.role: _about(folder) for folder in self.folders},
            "labels": {"origin": self.labels.origin, "ids": dict(self.labels.ids)},
            "preprocessing": self.prepared_for.describe(),
        }

    def write(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        """``model.safetensors`` in the given types and with its metadata, and ``config.json``."""
        parameters = dict(model.named_parameters())
        for name, dtype in self.stored_types.items():
            tensor = model.get_parameter(name) if name in parameters else model.get_buffer(name)
            tensor.data = tensor.data.to(dtype)
        save_weights(model, folder)
        keep_metadata(folder / WEIGHTS, self.checkpoint.weights)
        if self.application.model.is_dir():
            shutil.copyfile(self.checkpoint.weights.parent / CONFIG, folder / CONFIG)
        else:
            text = json.dumps(dict(self.checkpoint.config), indent=1)
            (folder / CONFIG).write_text(text + "\n")
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


def _about(folder: Folder) -> dict[str, Any]:
    return {
        "folder": folder.root.name,
        "images": len(folder.files),
        "classes": dict(Counter(file.split("/")[0] for file in folder.files)),
        "digest": folder.digest,
    }


def _summary(scores: Scores) -> dict[str, float]:
    scores.check_finite()
    loss = float(scores.loss.mean(dtype="float64"))
    return {"images": len(scores), "accuracy": scores.accuracy, "loss": loss}


def _auc(forget: Scores, test: Scores) -> float:
    from stable_forgetting.common.membership.attacks import loss_threshold_attack

    return loss_threshold_attack(forget.loss, test.loss).auc
