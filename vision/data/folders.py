"""Folders of images in the layout CLASS/.../image: listed, and every file is used or refused."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import file_digest

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
OF_THE_SYSTEM = frozenset({"thumbs.db", "desktop.ini"})
"""Files that Windows puts into folders of images."""


def class_files(root: Path, role: str) -> dict[str, list[Path]]:
    """Class -> its images, in the order of torchvision's ``ImageFolder``; no hidden file is one.

    Args:
        root: Holds one folder a class.
        role: Whose folder it is, for messages.

    Raises:
        DataError: It is missing or empty, or holds something that is not an image in a class.
    """
    if not root.is_dir():
        raise DataError(f"{role}: {root}: no such folder; give one of images")
    inside = [path for path in sorted(root.iterdir()) if not path.name.startswith(".")]
    loose = next((p for p in inside if p.suffix.lower() in IMAGES and p.is_file()), None)
    if loose is not None:
        raise DataError(f"{role}: {loose}: images must lie in class subfolders")
    classes = [path for path in inside if path.is_dir()]
    files = {folder.name: _files_below(folder, role) for folder in classes}
    for folder in classes:
        if not files[folder.name]:
            raise DataError(f"{role}: {folder} holds no images; fill it or remove it")
    if not files:
        raise DataError(f"{role}: {root} holds no class subfolders with images")
    return files


def _files_below(folder: Path, role: str) -> list[Path]:
    files = _visible(folder)
    for file in files:
        if file.suffix.lower() not in IMAGES or not file.is_file():
            raise DataError(
                f"{role}: {file}: not an image file; move it away, so that nothing "
                "is left out unseen"
            )
    return files


def _visible(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones and the system's; links are followed."""
    files: list[tuple[str, str]] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        own = (n for n in names if not n.startswith(".") and n.lower() not in OF_THE_SYSTEM)
        files += [(parent, name) for name in own]
    return [Path(parent, name) for parent, name in sorted(files)]


def listing_digest(root: Path) -> str:
    """SHA-256 of the names, sizes and times of the files below a folder; none is read."""
    state = hashlib.sha256()
    for file in (path for path in _visible(root) if path.is_file()):
        about = file.stat()
        state.update(os.fsencode(file.relative_to(root)))
        state.update(f"\0{about.st_size} {about.st_mtime_ns}\n".encode())
    return state.hexdigest()


def check_distinct(files: Iterable[tuple[Path, str]]) -> None:
    """Refuses files of different groups with the same bytes; only those of one size are read.

    Args:
        files: Each with the name of its group.

    Raises:
        DataError: Naming the first pair, and how many files are copies.
    """
    copies: list[tuple[Path, Path]] = []
    sizes: dict[int, list[tuple[Path, str]]] = defaultdict(list)
    for file, group in files:
        sizes[file.stat().st_size].append((file, group))
    for alike in sizes.values():
        owners: dict[str, tuple[Path, str]] = {}
        for file, group in alike if len({group for _, group in alike}) > 1 else ():
            first, owner = owners.setdefault(file_digest(file), (file, group))
            if owner != group:
                copies.append((first, file))
    if copies:
        first, file = copies[0]
        raise DataError(
            f"{first} and {file} are the same image; remove one of them ({len(copies)} files are "
            "copies in all)"
        )
