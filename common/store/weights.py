"""Model weights on disk: safetensors only, and errors that name the file and the mend."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from stable_forgetting.common.base.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


WEIGHTS = "model.safetensors"


def save_weights(model: nn.Module, folder: Path) -> None:
    """Writes the model's state dict as ``model.safetensors`` into ``folder``.

    Raises:
        CheckpointError: A tensor has a complex type that no such file holds.
    """
    import torch
    from safetensors.torch import save_model

    for name, tensor in model.state_dict().items():
        if tensor.is_complex() and tensor.dtype != torch.complex64:
            raise CheckpointError(
                f"'{name}' is {tensor.dtype}, which safetensors cannot hold; make it complex64"
            )
    save_model(model, str(folder / WEIGHTS))


def in_types(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """A copy whose named tensors have the given types; the model itself where none is named."""
    if not dtypes:
        return model
    model = copy.deepcopy(model)
    tensors = model.state_dict(keep_vars=True)
    for name, dtype in dtypes.items():
        tensors[name].data = tensors[name].data.to(dtype)
    return model


def load_weights(model: nn.Module, path: Path) -> None:
    """Loads a file that :func:`save_weights` wrote, in place.

    Raises:
        CheckpointError: The file is missing, damaged or of another model.
    """
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


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes, types and bytes, in their order; one at a time leaves a GPU."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """:func:`tensors_digest` of a model's state, by name."""
    return tensors_digest(dict(sorted(model.state_dict().items())))


def stored(path: Path) -> dict[str, tuple[list[int], str]]:
    """Name -> shape and type of what a safetensors file holds; empty where it cannot be read."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: (s.get_shape(), s.get_dtype()) for key, s in slices.items()}
    except (SafetensorError, OSError):
        return {}  # loading says what is wrong with it


def keep_metadata(written: Path, given: Path) -> None:
    """Puts the metadata of one safetensors file into the header of another, beside its own.

    What says which samples the weights were trained on (``trained_on``) is left out: it is not true
    of weights that have changed.
    """
    (size, header), (_, source) = _header(written), _header(given)
    metadata = header.get("__metadata__", {}) | source.get("__metadata__", {})
    metadata.pop("trained_on", None)
    if metadata == header.get("__metadata__", {}):
        return
    text = json.dumps({**header, "__metadata__": metadata}).encode()
    text += b" " * (-len(text) % 8)
    partial = written.with_name(f".{written.name}.partial")
    with written.open("rb") as old, partial.open("wb") as new:
        old.seek(8 + size)
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(old, new)
    os.replace(partial, written)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Length and content of a safetensors file's header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return size, json.loads(file.read(size))


CONFIG = "config.json"
WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""
_PICKLED = frozenset({".pth", ".pt", ".bin", ".pkl", ".pickle", ".ckpt", ".tar"})


def wrapper_of(names: Iterable[str]) -> str:
    """The prefixes of wrappers that all names have; empty where there is none."""
    names, prefix = list(names), ""
    while names:
        more = next((w for w in WRAPPERS if all(n.startswith(prefix + w) for n in names)), None)
        if more is None:
            return prefix
        prefix += more
    return prefix


def refuse_wrapped(path: Path, names: Iterable[str]) -> None:
    """Raises :class:`CheckpointError` where a wrapper was saved in the place of its model."""
    prefix = wrapper_of(names)
    if prefix:
        raise CheckpointError(
            f"{path}: all its names begin with '{prefix}', which a wrapper such as "
            f"DistributedDataParallel puts there; run: unlearn apply --convert "
            f"{shlex.quote(str(path))} --out FOLDER"
        )


def refuse_pickles(path: Path) -> None:
    """Raises :class:`CheckpointError` where a path ends as pickled weights do."""
    if path.suffix.lower() in _PICKLED:
        raise CheckpointError(
            f"{path}: a pickled checkpoint can run code when it is loaded; only .safetensors is "
            f"read: run unlearn apply --convert {shlex.quote(str(path))} --out FOLDER, which reads "
            "weights alone"
        )
