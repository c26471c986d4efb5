"""What a check says, and the watch over global state that several checks need."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class CheckResult:
    """One promise: kept or not, and what was seen."""

    name: str
    ok: bool
    detail: str = ""


@contextlib.contextmanager
def seeded_streams(salt: int) -> Iterator[Callable[[], list[str]]]:
    """Seeds the global random streams for a block; gives a function that names those that moved."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        random.seed(salt)
        np.random.seed(salt)  # noqa: NPY002
        torch.default_generator.manual_seed(salt)
        before = _global_streams()
        try:
            yield lambda: [name for name, now in _global_streams().items() if now != before[name]]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def _global_streams() -> dict[str, Any]:
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    return {
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
        "NumPy's global generator": (np.asarray(keys).tobytes(), position),
        "Python's random": random.getstate(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
    }
