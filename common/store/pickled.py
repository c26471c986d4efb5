"""Pickled weights become safetensors: the one place that opens a pickle, for tensors alone.

``torch.load(weights_only=True)`` builds tensors and plain containers and runs nothing else that a
file asks for; what holds more is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from stable_forgetting.common.base.errors import CheckpointError, one_line
from stable_forgetting.common.store.weights import wrapper_of

if TYPE_CHECKING:
    from torch import Tensor

STATES = ("state_dict", "model_state_dict", "model")
"""Where training loops put the weights, beside an optimizer and counters."""


@dataclass(frozen=True)
class Weights:
    """What a file held.

    Attributes:
        tensors: Name -> tensor on the CPU, without the prefixes of wrappers.
        entry: Under which entry of the file they lay; empty where they were the whole.
        prefix: The prefix that was taken off.
    """

    tensors: Mapping[str, Tensor]
    entry: str
    prefix: str


def read_weights(path: Path) -> Weights:
    """The weights of a pickled file, or of a .safetensors file.

    Raises:
        CheckpointError: It is missing or damaged, or holds more than weights.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; give a .pth, .pt, .bin or .safetensors file")
    content = _safetensors(path) if path.suffix == ".safetensors" else _unpickled(path)
    entry = next((key for key in STATES if isinstance(content.get(key), Mapping)), "")
    state = content[entry] if entry else content
    others = [name for name, value in state.items() if not _plain(name, value)]
    if others or not state:
        what = (
            f"'{others[0]}' is no tensor with a name and plain entries" if others else "it is empty"
        )
        raise CheckpointError(
            f"{path}: holds no plain weights ({what}); save model.state_dict() alone"
        )
    prefix = wrapper_of(state)
    tensors = {name.removeprefix(prefix): value for name, value in state.items()}
    return Weights(tensors, entry, prefix)


def _plain(name: Any, value: Any) -> bool:
    import torch

    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return isinstance(name, str) and dense and not value.is_quantized


def write_weights(weights: Weights, path: Path) -> None:
    """Writes them as a safetensors file, each tensor once and in its own type.

    Of tensors that share memory (tied weights) every name gets a copy.
    """
    from safetensors.torch import save_file

    tensors = {k: v.detach().clone().contiguous() for k, v in weights.tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({one_line(error)}); fetch it again"
        ) from None


def _unpickled(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many types on foreign or damaged bytes
        text = one_line(error).split(". ")[0]
        raise CheckpointError(
            f"{path}: holds more than weights, or is damaged ({text}); save model.state_dict() "
            "alone, where you trust the file"
        ) from None
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}, not weights; save model.state_dict()"
        )
    return content
