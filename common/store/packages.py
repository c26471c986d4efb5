"""Weights that installed packages bring: a config names ``package:NAME``.

The packages are found, never imported.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stable_forgetting.common.base.errors import CheckpointError, DataError, one_line

PACKAGE = "package:"
"""How the name of weights begins that lie in an installed package."""


class Package(NamedTuple):
    """A file of weights that packages bring.

    Attributes:
        parts: (package as Python finds it, file below its folder); in this order they make the
            file.
        sha256: Start of the file's SHA-256.
        extra: Extra of this project that installs the packages.
    """

    parts: tuple[tuple[str, str], ...]
    sha256: str
    extra: str

    def files(self, name: str) -> list[Path]:
        """The parts of the file that a config calls ``name``.

        Raises:
            DataError: A package is not installed.
            CheckpointError: Their content is not the one that is known.
        """
        paths = [_folder_of(name, module, self.extra) / file for module, file in self.parts]
        digest = hashlib.sha256()
        for path in paths:
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from None
        if not digest.hexdigest().startswith(self.sha256):
            raise CheckpointError(
                f"{paths[0]}: its SHA-256 is {digest.hexdigest()[:20]}..., not {self.sha256}...; "
                "install the package anew"
            )
        return paths


def _folder_of(name: str, module: str, extra: str) -> Path:
    found = find_spec(module)
    if found is None or found.origin is None:
        raise DataError(
            f"{name}: the package is not installed; run: pip install 'stable-forgetting[{extra}]'"
        )
    return Path(found.origin).parent
