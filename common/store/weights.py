"""Model weights on disk: safetensors only, and errors that name the file and the mend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.base.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn


WEIGHTS = "model.safetensors"


def save_weights(model: nn.Module, folder: Path) -> None:
    """Writes the model's state dict as ``model.safetensors`` into ``folder``."""
    from safetensors.torch import save_model

    save_model(model, str(folder / WEIGHTS))


def load_weights(model: nn.Module, path: Path) -> None:
    """Loads a file that :func:`save_weights` wrote, in place.

    Raises:
        CheckpointError: The file is missing, damaged or of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    try:
        load_model(model, str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; delete its folder and rerun") from None
    except (SafetensorError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path}: damaged or of another model ({first}); delete {path.parent} and rerun"
        ) from None


CONFIG = "config.json"
_PICKLED = frozenset({".pth", ".pt", ".bin", ".pkl", ".pickle", ".ckpt", ".tar"})


def refuse_pickles(path: Path) -> None:
    """Raises :class:`CheckpointError` where a path ends as pickled weights do."""
    if path.suffix.lower() in _PICKLED:
        raise CheckpointError(
            f"{path}: a pickled checkpoint can run code when it is loaded; only .safetensors is "
            "read: convert it with safetensors.torch.save_file"
        )
