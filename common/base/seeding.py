"""One seed -> named, independent random streams.

Index draws order indices by a hash of (seed, index), so that they do not depend on the stability
of any library's generator.  Everything else draws from an explicit ``torch.Generator`` whose seed
is a hash of (seed, names).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream ``names`` under ``seed``."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the stream ``names``; draws are moved to a device afterwards."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))


def hash_order(indices: Iterable[int], seed: int, *names: str | int) -> np.ndarray:
    """``indices`` (int64) in an order fixed by a hash of (seed, names, index)."""
    prefix = "/".join(str(part) for part in (seed, *names)).encode() + b"/"
    base = hashlib.blake2b(prefix, digest_size=8)
    keyed = []
    for index in indices:
        state = base.copy()
        state.update(int(index).to_bytes(8, "little"))
        keyed.append((state.digest(), int(index)))
    return np.array([index for _, index in sorted(keyed)], dtype=np.int64)


def make_deterministic(threads: int | None = None) -> None:
    """Lets torch take deterministic kernels alone, with ``threads`` intra-op threads if given.

    Strictly: if torch only warned, the backward pass of attention would add in any order on CUDA.
    cuBLAS repeats its bits only with a workspace of fixed size, which it reads when it starts.
    Empty buffers stay empty: torch would fill each with NaN, as long as writing it takes.
    """
    import torch
    from torch.utils import deterministic

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports the compiler
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(False)  # not deterministic on every card
    torch.backends.cudnn.benchmark = False
    if threads:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Puts back afterwards what :func:`make_deterministic` sets inside; the environment stays."""
    import torch
    from torch.utils import deterministic

    mode, threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    attention, searched = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(attention)
        torch.backends.cudnn.benchmark = searched
        torch.set_num_threads(threads)
