"""A user's folders of images: listed, hashed, labelled, decoded as the model expects them.

Every file is used or named in an error: an image of the forget set that was skipped in silence
would not be forgotten.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stable_forgetting.common.base.config import canonical, did_you_mean, digest
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.store.weights import CONFIG
from stable_forgetting.vision.apply.checkpoint import Checkpoint
from stable_forgetting.vision.apply.preprocessing import Preprocessing
from stable_forgetting.vision.config import DataConfig
from stable_forgetting.vision.data.folders import class_files

if TYPE_CHECKING:
    import torch

    from stable_forgetting.vision.apply.memory import GivenClassifier
    from stable_forgetting.vision.data.source import ImageSource

IMAGE, LABEL = ("image", "img", "pixel_values"), ("label", "labels")
"""Columns of a data set whose samples are mappings, as on the hub."""


@dataclass(frozen=True)
class Images:
    """Images of one role, listed and hashed but not decoded: class subfolders, or a data set.

    Attributes:
        role: ``forget``, ``retain`` or ``test``.
        members: Class of each image: the name of its subfolder, or its label as text.
        names: What each image is called in messages; the path of a file.
        hashes: SHA-256 of each file, or of each image of a data set.
        digest: SHA-256 over images and classes.
        root: The folder, of files.
        pairs: The samples, of a data set: (image, label) each.
    """

    role: str
    members: tuple[str, ...]
    names: tuple[str, ...]
    hashes: tuple[str, ...]
    digest: str
    root: Path | None = None
    pairs: Any = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that occur, sorted."""
        return tuple(sorted(set(self.members)))

    @property
    def tensors(self) -> bool:
        """Whether the images are tensors; else they are files, or PIL's."""
        return self.pairs is not None and not is_picture(self.pairs[0][0])

    def about(self) -> dict[str, Any]:
        """The statement's facts."""
        counts = {"images": len(self.members), "classes": dict(Counter(self.members))}
        place = {} if self.root is None else {"folder": self.root.name}
        return {**place, **counts, "digest": self.digest}

    def decoded(
        self, prepared_for: Preprocessing, ids: Mapping[str, int]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Every image as the model's input, uint8, with its label."""
        for number, (name, member) in enumerate(zip(self.names, self.members, strict=True)):
            if self.pairs is None:
                yield prepared_for.decode(Path(name)), ids[member]
            else:
                yield prepared_for.convert(self.pairs[number][0]), int(member)


def is_picture(image: Any) -> bool:
    """Whether an image is one of PIL."""
    return hasattr(image, "tobytes") and hasattr(image, "convert")


def list_folder(root: Path, role: str) -> Images:
    """Lists a folder in the layout CLASS/.../image.

    Raises:
        DataError: It is missing or empty, holds something that is not an image in a class, or a
            name that is not UTF-8.
    """
    listed = chain(*class_files(root, role).values())
    files = sorted(file.relative_to(root).as_posix() for file in listed)
    hashes = tuple(file_digest(root / file) for file in files)
    state = hashlib.sha256()
    for file, content in zip(files, hashes, strict=True):
        try:
            state.update(f"{file}\0{content}\n".encode())
        except UnicodeEncodeError:
            raise DataError(f"{role}: {root}: {file!a} is no UTF-8 name; rename it") from None
    members = tuple(file.split("/")[0] for file in files)
    names = tuple(str(root / file) for file in files)
    return Images(role, members, names, hashes, state.hexdigest(), root)


def check_disjoint(parts: Sequence[Images]) -> None:
    """Raises if two folders or data sets share an image, by content.

    Raises:
        DataError: Naming one pair.
    """
    owners: dict[str, tuple[str, str]] = {}
    for part in parts:
        for name, content in zip(part.names, part.hashes, strict=True):
            role, first = owners.setdefault(content, (part.role, name))
            if role != part.role:
                raise DataError(
                    f"{first} ({role}) and {name} ({part.role}) "
                    "are the same image; an image belongs to one of them"
                )


@dataclass(frozen=True)
class Labels:
    """Class folder name -> label id, and where that mapping comes from."""

    ids: Mapping[str, int]
    origin: str


def map_labels(checkpoint: Checkpoint | GivenClassifier, folders: Sequence[Images]) -> Labels:
    """Label ids of the class folders.

    From ``label_names`` of the checkpoint; without them, from the sorted names of the retain
    folder (or of all folders together) where these are as many as the model's classes; else from
    names that are label ids themselves.

    Raises:
        DataError: A folder is no class of the model, or two readings of the names disagree.
    """
    if checkpoint.label_names is not None:
        ids = {name: label for label, name in enumerate(checkpoint.label_names)}
        for folder in folders:
            _check_labels(folder, ids, "label_names of the checkpoint")
        return Labels(ids, "label_names of the checkpoint")
    count = checkpoint.num_classes
    names = sorted({name for folder in folders for name in folder.classes})
    retained = next((folder.classes for folder in folders if folder.role == "retain"), ())
    by_order = next((full for full in (retained, names) if len(full) == count), None)
    by_value = {name: int(name) for name in names if name.isascii() and name.isdigit()}
    numeric = len(by_value) == len(names) and max(by_value.values()) < count
    if by_order is not None:
        ids = {name: label for label, name in enumerate(by_order)}
        for folder in folders:
            _check_labels(folder, ids, "the retain folder")
        if numeric and any(ids[name] != by_value[name] for name in names):
            raise DataError(
                "class folders are numbers whose order by name differs from that by value; "
                f"put label_names into the model's {CONFIG}"
            )
        return Labels(ids, "sorted names of the class folders")
    if not numeric:
        raise DataError(
            f"the class folders name {len(names)} classes, but the model has {count}: put "
            f"label_names into its {CONFIG}, or name the folders 0 to {count - 1}"
        )
    owners: dict[int, str] = {}
    for name, label in by_value.items():
        first = owners.setdefault(label, name)
        if first != name:
            raise DataError(
                f"the class folders '{first}' and '{name}' are both class {label}; make them one, "
                f"or put label_names into the model's {CONFIG}"
            )
    return Labels(by_value, "numeric names of the class folders")


def _check_labels(folder: Images, ids: Mapping[str, int], origin: str) -> None:
    for name in folder.classes:
        if name not in ids:
            hint = did_you_mean(name, sorted(ids) if len(ids) <= 20 else [])
            raise DataError(
                f"{folder.role}: {folder.root}/{name}: '{name}' is no class in {origin}{hint}"
            )


def placed(samples: Sequence[Images]) -> dict[str, np.ndarray]:
    """Role -> (N,) int64 indices of its images, one folder or data set after the other."""
    parts: dict[str, np.ndarray] = {}
    start = 0
    for part in samples:
        parts[part.role] = start + np.arange(len(part.members), dtype=np.int64)
        start += len(part.members)
    return parts


def load_images(
    folders: Sequence[Images], labels: Labels, prepared_for: Preprocessing, device: Any
) -> ImageSource:
    """Decodes every image once, to the model's input size.

    Raises:
        DataError: An image cannot be decoded; the file is named.
    """
    import torch

    from stable_forgetting.vision.data.source import ImageSource, InputSpec, PreparedImages

    pixels: list[torch.Tensor] = []
    targets: list[int] = []
    for folder in folders:
        for image, label in folder.decoded(prepared_for, labels.ids):
            pixels.append(image)
            targets.append(label)
    names = {label: name for name, label in labels.ids.items()}
    preparation = canonical(
        [[folder.role, folder.digest] for folder in folders]
        + [dict(labels.ids), dataclasses.asdict(prepared_for)]
    )
    parts = placed(folders)
    train = np.concatenate([parts[role] for role in ("forget", "retain") if role in parts])
    empty = np.empty(0, dtype=np.int64)
    images = PreparedImages(
        torch.stack(pixels),
        np.array(targets, dtype=np.int64),
        {"train": train, "validation": empty, "test": parts.get("test", empty)},
        None,
        tuple(names.get(label, str(label)) for label in range(max(names) + 1)),
        "image folders of the user",
        digest(preparation),
    )
    config = DataConfig(
        name="folder", folder="images", native_size=prepared_for.size, augment=False
    )
    spec = InputSpec(prepared_for.size, prepared_for.mean, prepared_for.std)
    return ImageSource(images, config, spec, device=device)
