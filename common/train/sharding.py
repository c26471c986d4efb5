"""A model whose parameters are split over processes while it trains, and whole before and after.

FSDP2 (``torch.distributed.fsdp.fully_shard``) changes a model for good.  Here a twin is split and
trained, so that the caller keeps its own modules and parameters: empty during training, filled
wherever somebody looks (:meth:`Sharded.whole`) and at the end.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.bounded.layer import adapted_layers


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a split tensor, every other one itself; all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, equal on all processes, split as ``parameter`` is if shapes agree."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    return distribute_tensor(
        tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _only_vectors(module: nn.Module) -> bool:
    """Whether a module, such as a norm, has parameters of its own and no matrix."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.dim() < 2 for parameter in own)


class Sharded:
    """Splits a twin of ``model`` over all processes.

    Under autocast to bfloat16 the matrices of a unit without adapters are gathered in bfloat16, as
    autocast would round them; gradients are summed in float32.  All else keeps its type.

    Args:
        model: Whole and equal on all processes, on their devices; lends its tensors to the twin.
        units: Class names of the modules that are gathered one at a time, such as a block's; what
            lies outside them is gathered at once.
        reshard: Whether a unit is freed between forward and backward.
        low: Whether the training multiplies in bfloat16.
        offload: Whether parts, their gradients and moments lie in main memory.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Collection[str],
        *,
        reshard: bool,
        low: bool = False,
        offload: bool = False,
    ):
        self.model = model
        memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
        for parameter in model.parameters():
            lent = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = lent
        self.twin: nn.Module = copy.deepcopy(model, memo)
        device = self.device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        how: dict[str, Any] = {"mesh": mesh}
        if offload:
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for module in [m for m in self.twin.modules() if type(m).__name__ in units]:
            policy = MixedPrecisionPolicy()
            if low and not any(True for _ in adapted_layers(module)):
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False)
                vectors = [m for m in module.modules() if _only_vectors(m)]
                if vectors:
                    fully_shard(vectors, reshard_after_forward=reshard, **how)
            fully_shard(module, reshard_after_forward=reshard, mp_policy=policy, **how)
        fully_shard(self.twin, **how)
        self._own_children = model.__dict__["_modules"]

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Splits for the duration; ``model`` shows the twin's modules, and is whole at the end.

        Also after :class:`Diverged`, which all processes raise.  Any other error may be this
        process's alone: waiting for the others would then hang, and ``model`` stays empty.
        """
        self.twin.train(self.model.training)
        self._empty()
        try:
            yield
        except Diverged:
            self._fill()
            raise
        self._fill()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """``model`` has its whole values inside; what they become is what training goes on with."""
        self._fill()
        try:
            yield
            with torch.no_grad():
                shards = dict(self.twin.named_parameters())
                for name, parameter in self.model.named_parameters():
                    shards[name].copy_(
                        like(parameter.detach().to(shards[name].dtype), shards[name])
                    )
        finally:
            self._empty()

    @torch.no_grad()
    def _fill(self) -> None:
        for module in self.twin.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves the root gathered
        self.model.__dict__["_modules"] = self._own_children
        shards = dict(self.twin.named_parameters())
        for name, parameter in self.model.named_parameters():
            whole = whole_tensor(shards[name].detach()).to(self.device)
            padded = whole.untyped_storage().nbytes() > whole.nbytes  # files refuse such views
            parameter.data = whole.clone() if padded else whole

    def _empty(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)
        self.model.__dict__["_modules"] = self.twin.__dict__["_modules"]
