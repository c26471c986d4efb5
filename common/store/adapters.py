"""Folders of PEFT adapters: whose they are, and merged into a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stable_forgetting.common.base.errors import CheckpointError, one_line
from stable_forgetting.common.store.weights import refuse_pickles

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def base_of(folder: Path) -> str:
    """Folder or hub id of the model that an adapter is for.

    Raises:
        CheckpointError: The adapter's weights are pickled or missing, or it names no model or
            another adapter.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():
        for other in sorted(folder.iterdir()):
            refuse_pickles(other)
        raise CheckpointError(f"{folder}: holds no {ADAPTER_WEIGHTS}; add it")
    config = folder / ADAPTER_CONFIG
    try:
        base: Any = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{config}: names no base_model_name_or_path; add the folder or hub id of the model "
            "that the adapter is for"
        )
    if is_adapter(base):
        raise CheckpointError(f"{folder}: its base {base} is an adapter too; merge that one first")
    return base


def read_base(folder: Path, read: Callable[[Path], T]) -> T:
    """What a reader makes of the model that an adapter is for.

    Raises:
        CheckpointError: Naming the adapter, as its user gave no other name.
    """
    base = base_of(folder)
    try:
        return read(Path(base))
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path: {error}"
        ) from None


def with_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """The model with an adapter merged into its weights.

    Raises:
        CheckpointError: PEFT is not installed, or cannot merge the adapter into this model.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise CheckpointError(
            f"{folder}: holds a PEFT adapter; pip install 'stable-forgetting[peft]'"
        ) from None
    loader: Any = PeftModel
    try:
        merged: nn.Module = loader.from_pretrained(model, str(folder)).merge_and_unload()
    except Exception as error:  # PEFT raises many unrelated types for an adapter of another model
        raise CheckpointError(
            f"{folder}: PEFT cannot merge it into its model ({one_line(error)}); merge it "
            "yourself and give the whole model"
        ) from None
    return merged
