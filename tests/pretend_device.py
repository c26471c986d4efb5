"""A device that is none: tensors on it are CPU tensors that may meet no others.

``pytest -p pretend_device`` (with this folder on the path) makes it what ``--device auto`` takes,
so that everything that a test runs through a benchmark, a subject or a probe lies on it.  A test
fails where a tensor of the CPU meets one of the device, even where the error itself was caught: the
calls that CUDA refuses, refused on a machine without CUDA, with the Python stack of the call.

Allowed is what CUDA allows: copies; a CPU tensor without dimensions that an elementwise operator
only reads; indices on the CPU into a tensor of the device.  Refused are also a generator of the
CPU that draws on the device, ``numpy()``, and the operators that have no deterministic kernel on
CUDA: under :func:`common.base.seeding.make_deterministic` torch raises there.

What it cannot see: branches that ask for CUDA by name (``is_cuda``, random states in checkpoints,
peak memory), the Triton kernels and ``torch.compile`` for a GPU; streams, asynchronous copies and
pinned memory (its copies are done when they return); which types, operators and kernels a device
has, and what their sums round to; several accelerators; memory; autocast, which casts nothing here.
The backend is torch's for devices written in Python, which is experimental.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "pretend"
CPU = torch.device("cpu")
COPIES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"}
"""Operators whose index tensors may lie on the CPU."""
FIRST_HERE = (
    *("copy_", "fill_.Scalar", "zero_", "_copy_from", "set_.source_Tensor"),
    *("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm"),
)
"""Operators that torch's C++ calls behind a subclass's back, or makes of others that resize."""
NOT_DETERMINISTIC = {
    f"aten::{name}"
    for name in (
        *("kthvalue", "median", "nanmedian", "mode", "histc", "put", "put_", "_ctc_loss"),
        *("nll_loss2d_forward", "_embedding_bag", "scatter_reduce", "scatter_reduce_"),
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
        *("adaptive_max_pool2d_backward", "max_pool3d_with_indices_backward"),
        *("avg_pool3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
        *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
        *("replication_pad1d_backward", "replication_pad2d_backward"),
        *("upsample_linear1d_backward", "upsample_bilinear2d_backward"),
        *("_upsample_bilinear2d_aa_backward", "upsample_bicubic2d_backward"),
        *("_upsample_bicubic2d_aa_backward", "upsample_trilinear3d_backward"),
    )
}
"""Operators that ``torch.use_deterministic_algorithms`` says to raise on CUDA."""
MEETINGS: list[str] = []
"""What was refused since the last test: operator, shapes, where in the code."""


class DevicesMeet(RuntimeError):
    """Tensors of two devices in one call."""


class PretendTensor(Tensor):
    """A tensor of the device; ``inner`` holds its values on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        """Wraps a CPU tensor, which belongs to the device from now on."""
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parameter stays one; torch's own copy sets a storage, which a wrapper has not."""
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied._is_param = getattr(self, "_is_param", False)
            memo[id(self)] = copied
        return memo[id(self)]

    def numpy(self, *, force: bool = False) -> Any:
        """Only of a copy on the CPU, as on a GPU."""
        raise _refused("numpy()", [self])

    def tolist(self) -> Any:
        """Numbers, copied."""
        return self.inner.tolist()

    def data_ptr(self) -> int:
        """Address of the first value, as of any tensor."""
        return self.inner.data_ptr()

    def storage(self) -> Any:
        """The memory that views share."""
        return self.inner.storage()

    def untyped_storage(self) -> Any:
        """The same without a type."""
        return self.inner.untyped_storage()

    @property
    def data(self) -> Tensor:
        """The values, outside autograd."""
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, PretendTensor):
            raise _refused("data =", [new])
        Tensor.data.__set__(self, new)
        self.inner = new.inner

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        made = operator.decompose(*args, **(kwargs or {}))  # without autograd none else does it
        return _call(operator, *args, **(kwargs or {})) if made is NotImplemented else made


def _call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """One operator, outside inference mode, in which views of a wrapped parameter are refused."""
    with torch.inference_mode(False), torch.no_grad():
        return _computed(operator, args, kwargs)


def _computed(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator on the CPU, if nothing in it lies elsewhere."""
    name = operator._schema.name
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [t for t in tensors if isinstance(t, PretendTensor)]
    asked = kwargs.get("device")
    device = here[0].device if asked is None and here else torch.device(asked or CPU)
    if name not in COPIES and here and asked is None:
        _check_tensors(operator, name, args, kwargs)
    if device.type == NAME:
        _check_generators(name, args, kwargs)
        if name in NOT_DETERMINISTIC:
            raise _refused(f"{name}, which is not deterministic,", [])
    inner_args, inner_kwargs = tree_map_only(PretendTensor, lambda t: t.inner, (args, kwargs))
    if asked is not None:
        inner_kwargs["device"] = CPU
    inner_kwargs.pop("pin_memory", None)
    out = operator(*inner_args, **inner_kwargs)
    if name in COPIES and asked is None and isinstance(args[0], Tensor):
        device = args[0].device if name == "aten::copy_" else device
    if name == "aten::copy_":
        return args[0]
    if name == "aten::_to_copy" and any(out is t for t in tree_leaves(inner_args)):
        out = out.clone()
    outer = {id(t.inner): t for t in here}
    wrap = PretendTensor if device.type == NAME else _same
    made = tree_map_only(Tensor, lambda t: outer[id(t)] if id(t) in outer else wrap(t), out)
    if any(tensor.shape != tensor.inner.shape for tensor in here):
        # no assert: pytest would print the tensors, and printing them comes back here
        raise DevicesMeet(f"{name}: changes a shape in place")
    return made


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _check_tensors(
    operator: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuses what CUDA refuses in an operator that has a tensor of the device."""
    elementwise = torch.Tag.pointwise in operator.tags or name.startswith("aten::_foreach_")
    strangers = []
    given = {a.name: value for a, value in zip(operator._schema.arguments, args, strict=False)}
    for argument in operator._schema.arguments:
        value = given.get(argument.name, kwargs.get(argument.name))
        if name in INDEXED and argument.name == "indices":
            continue
        changed = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            plain = isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor)
            if plain and (leaf.dim() or changed or not elementwise):
                strangers.append(leaf)
    if strangers:
        raise _refused(name, strangers)


def _check_generators(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        raise _refused(f"{name} with a generator", [])


def _refused(name: str, tensors: Sequence[Tensor]) -> DevicesMeet:
    """The error, which is also noted: code that catches it hides nothing."""
    shapes = ", ".join(f"{t.device.type} {tuple(t.shape)}" for t in tensors) or CPU.type
    stack = "".join(traceback.format_stack(limit=16)[:-2])
    MEETINGS.append(f"{name}: {shapes} meets {NAME}\n{stack}")
    return DevicesMeet(MEETINGS[-1])


class _Module(_DummyBackendModule):
    """What torch asks of a device: its random stream is the CPU's."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        """The state of that stream."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Puts it back."""
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may be asked for."""
        return [torch.bfloat16, torch.float16]


def register() -> list[torch.library.Library]:
    """Makes the device known to torch; the libraries must be held."""
    warnings.filterwarnings("ignore", message=".*kernel.*PrivateUse1.*")
    _setup_privateuseone_for_python_backend(NAME, _Module())
    anything = torch.library.Library("_", "IMPL")
    anything.fallback(_call, "PrivateUse1")
    behind = torch.library.Library("aten", "IMPL")
    for key in FIRST_HERE:
        packet, _, overload = key.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def kernel(*args: Any, _operator: Any = operator, **kwargs: Any) -> Any:
            return _call(_operator, *args, **kwargs)

        behind.impl(key, kernel, "PrivateUse1")
    return [anything, behind]


def tied(apply: Any) -> Any:
    """``Module._apply`` that leaves shared parameters shared, as a GPU does."""

    def run(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        made = apply(module, *args, **kwargs)
        for first, *others in names.values():
            for name in others:
                parent, _, own = name.rpartition(".")
                setattr(module.get_submodule(parent), own, module.get_parameter(first))
        return made

    return run


# The pytest plugin -------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """``auto`` is the device, also for modules that have taken the function by its name."""
    from stable_forgetting.common.protocol import benchmark

    config.stash[pytest.StashKey[list[torch.library.Library]]()] = register()
    torch.nn.Module._apply = tied(torch.nn.Module._apply)  # type: ignore[method-assign]
    usual = benchmark.pick_device
    for module in list(sys.modules.values()):
        if getattr(module, "pick_device", None) is usual:
            module.pick_device = lambda name: NAME if name == "auto" else name  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _nothing_met() -> Iterator[None]:
    MEETINGS.clear()
    yield
    if MEETINGS:
        pytest.fail("tensors of two devices met:\n" + "\n".join(MEETINGS), pytrace=False)
