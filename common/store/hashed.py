"""Safetensors files whose metadata hold the SHA-256 of all the rest, found while they are written.

One tensor at a time passes through main memory; it is hashed in a thread while it is written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from stable_forgetting.common.base.errors import CheckpointError, named_line

if TYPE_CHECKING:
    import torch

_BLANK = "0" * 64
_DIGEST = re.compile(rb'"sha256": "([0-9a-f]{64})"')
_PIECE = 1 << 20
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
}
"""Name of a torch type -> its name in a header."""


def write_hashed(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes tensors of any device, and text beside them, with the digest of both.

    Raises:
        CheckpointError: A tensor has a type that no such file holds.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # aligned
    text = _header(names, tensors, metadata)
    digest = hashlib.sha256(text)
    with path.open("wb") as file, ThreadPoolExecutor(1) as hasher:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            content = _content(tensors[name])
            hashed = hasher.submit(digest.update, content)
            file.write(content)
            hashed.result()
        file.seek(8)
        file.write(text.replace(_BLANK.encode(), digest.hexdigest().encode(), 1))


def _header(
    names: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"sha256": _BLANK, **metadata}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _CODES:
            raise CheckpointError(
                f"'{name}' is {kind}, which a checkpoint cannot hold; give it another type"
            )
        header[name] = {
            "dtype": _CODES[kind],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _content(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def read_metadata(path: Path) -> dict[str, str]:
    """The text beside a file's tensors.

    Raises:
        CheckpointError: It is missing, or no such file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged checkpoint ({named_line(error)})") from None


def check_hashed(path: Path) -> None:
    """Raises CheckpointError where a file is not what :func:`write_hashed` wrote."""
    with path.open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        found = _DIGEST.search(text)
        blank = text if found is None else text.replace(found[1], _BLANK.encode(), 1)
        digest = hashlib.sha256(blank)
        while piece := file.read(_PIECE):
            digest.update(piece)
    if found is None or digest.hexdigest() != found[1].decode():
        raise CheckpointError(f"{path}: damaged checkpoint")
