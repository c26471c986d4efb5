"""Tensors that are split over processes, on disk: each process writes and reads its own part.

``torch.distributed.checkpoint`` decides who writes what, and which rows of which file a process
reads; so the number of processes may change.  Its safetensors format has no pickle.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stable_forgetting.common.base import processes
from stable_forgetting.common.base.files import file_digest, sync


def is_split(tensor: Tensor) -> bool:
    """Whether this process holds a part of it."""
    return isinstance(tensor, DTensor)


def save_parts(
    tensors: Mapping[str, Tensor], folder: Path, *, first: bool
) -> list[tuple[str, str]]:
    """Writes split tensors, and whole ones once; all processes must call it.

    Args:
        tensors: Name -> a tensor.
        folder: What is in it is replaced.
        first: In one of the processes.

    Returns:
        Name and digest of every file; they are on the disk.
    """
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    if first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    processes.wait_for_all()
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    checkpoint.save(dict(tensors), storage_writer=writer, process_group=processes.group())
    own = folder.glob(f"shard-{processes.index() + 1:05d}-*")
    files = processes.gathered([(path.name, f":{file_digest(path)}") for path in own])
    sync([folder, folder.parent])
    return sorted(file for listed in files for file in listed)


def load_parts(
    tensors: Mapping[str, Tensor], folder: Path, owner: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Fills tensors with what :func:`save_parts` wrote of them, split as they are.

    Args:
        tensors: Name -> a tensor; filled in place.
        folder: Of the files.
        owner: Name of a further tensor in the files -> the tensor as which it is split if it has
            its shape.

    Returns:
        The further tensors.
    """
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    others: dict[str, Tensor] = {}
    found: Any
    for name, found in reader.read_metadata().state_dict_metadata.items():
        if name not in tensors:
            like, dtype = owner(name), found.properties.dtype
            same = like.shape == found.size
            empty = torch.zeros_like(like, dtype=dtype) if same else torch.zeros(found.size)
            others[name] = empty.to(dtype)
    wanted = {**tensors, **others}
    checkpoint.load(wanted, storage_reader=reader, process_group=processes.group())
    return others


def is_part(file: Path) -> bool:
    """Whether :func:`save_parts` wrote a file."""
    return file.name.startswith("shard-")


def own_share(files: Mapping[str, str]) -> dict[str, str]:
    """The files that this process checks; every process checks others."""
    return dict(list(files.items())[processes.index() :: processes.count()])


def remove_parts(path: Path, kept: Collection[str] = ()) -> None:
    """Removes the folders of a checkpoint's parts, except some."""
    for folder in path.parent.glob(f"{path.stem}.*"):
        if folder.is_dir() and folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)
