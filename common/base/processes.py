"""One stage in several processes: how they meet, who writes, and what the others wait for.

A launcher (``torchrun``, ``accelerate launch``) starts every process with the same command line.
All of them train; the first one alone writes, and the others read what it wrote.  Importing this
module imports no torch, and without a launcher nothing here does either.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
from typing import Any

from stable_forgetting.common.base.errors import ConfigError

PATIENCE = datetime.timedelta(days=30)
"""How long the others wait: one process may measure or write a large model for hours."""


def count() -> int:
    """Processes that the launcher started; 1 without one."""
    return _number("WORLD_SIZE", 1) if "LOCAL_RANK" in os.environ else 1


def index() -> int:
    """This process among them, from 0."""
    return _number("RANK", 0) if count() > 1 else 0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text} in the environment: must be a whole number") from None


def forget_cluster() -> None:
    """Without a launcher of ours, a cluster's WORLD_SIZE and RANK count other things."""
    if "LOCAL_RANK" not in os.environ:
        for name in ("WORLD_SIZE", "RANK"):
            os.environ.pop(name, None)


def is_main() -> bool:
    """Whether this process is the one that writes."""
    return index() == 0


def wait_for_all() -> None:
    """Returns once all processes are here, at once where there is one."""
    if count() > 1:
        import torch

        torch.distributed.barrier(group())


def gathered(value: Any) -> list[Any]:
    """What every process says, in their order."""
    if count() == 1:
        return [value]
    import torch

    values = [None] * count()
    torch.distributed.all_gather_object(values, value, group())
    return values


@functools.cache
def group() -> Any:
    """All processes, on the CPU: a device's own collectives give up after minutes."""
    import torch

    return torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


def disconnect() -> None:
    """Leaves the group of processes, if this process ever joined one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        group.cache_clear()
        distributed.destroy_process_group()
