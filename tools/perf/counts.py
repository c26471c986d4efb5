"""Deterministic counts: bytes saved and allocated, forwards, decode steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Counting ----------------------------------------------------------------------------------------


def saved_bytes(run: Callable[[], object], operands: Iterable[Tensor] = ()) -> int:
    """Bytes of unique storages that autograd keeps for the backward pass, ``operands`` left out.

    Args:
        run: A forward pass that returns its output (or anything that holds it).
        operands: What exists anyway: inputs, parameters, buffers.
    """
    ignored = {tensor.untyped_storage().data_ptr() for tensor in operands}
    saved: dict[int, Tensor] = {}  # tensors stay alive, so that no address is given out twice

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    sizes = {at: t.untyped_storage().nbytes() for at, t in saved.items() if at not in ignored}
    del output
    return sum(sizes.values())


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that one run holds at once beyond what was there, by the profiler's ledger.

    What the run leaves behind counts too; make lazily created state before.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every start and stop is told
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    ledger = recorded.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in ledger if event.name() == "[memory]"]
    held = np.cumsum([size for _, size in sorted(changes, key=lambda change: change[0])])
    return max(int(held.max(initial=0)), 0)


class _Work(TorchDispatchMode):
    """Watches every operator call that reaches a backend: forward, backward, optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.flops = self.new_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls += 1
        self.new_bytes += _new_bytes((args, kwargs), out)
        if (count := flop_registry.get(_out_of_place(func))) is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out


def _out_of_place(func: Any) -> Any:
    """``addmm`` for ``addmm_``, which torch's own counter does not know."""
    name = func.overloadpacket._qualified_op_name
    packet = name.removeprefix("aten::").removesuffix("_")
    return getattr(torch.ops.aten, packet, None) if name.endswith("_") else func.overloadpacket


def _new_bytes(inputs: object, outputs: object) -> int:
    """Bytes of the output storages that are not storages of inputs."""
    given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(inputs)}
    made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(outputs)}
    return sum(size for at, size in made.items() if at not in given)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def work(run: Callable[[], object]) -> dict[str, float]:
    """What one run (not under inference mode) asks for: ``MFLOP``, ``new MB``, ``calls``.

    FLOPs are those of matrix products, convolutions and attention; new bytes those of all storages
    that operators allocated for their results; calls include views.  None of them sees into what
    is not torch's own (a custom kernel, PIL).
    """
    with _Work() as mode:
        run()
    return {"MFLOP": mode.flops / 1e6, "new MB": mode.new_bytes / 1e6, "calls": mode.calls}


@dataclass
class Forwards:
    """Calls of a module and the samples that went through it."""

    calls: int = 0
    samples: int = 0


@contextlib.contextmanager
def counted(module: nn.Module) -> Iterator[Forwards]:
    """Counts forwards of ``module`` inside the block."""
    seen = Forwards()

    def note(_: nn.Module, inputs: tuple[Any, ...], __: object) -> None:
        seen.calls += 1
        seen.samples += len(inputs[0])

    handle = module.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
