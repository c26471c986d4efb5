"""What layers are given: second moments of their inputs, and the features in front of the head."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import ordered_batches
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.methods.tools.passes import EVALUATION_BATCH
from stable_forgetting.common.train.telemetry import evaluating


def matrix_layers(model: nn.Module, patterns: Sequence[str] = ("*",)) -> dict[str, nn.Module]:
    """Linear layers and ungrouped convolutions that are not frozen, in the model's order.

    Raises:
        ConfigError: No such layer matches.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if _is_matrix(module)
        and module.get_parameter("weight").requires_grad
        and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    if not found:
        raise ConfigError(
            f"layers: no linear layer or convolution matches {', '.join(patterns)}; choose others"
        )
    return found


def _is_matrix(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d):
        return type(module) is nn.Linear
    plain = module.groups == 1 and module.padding_mode == "zeros"
    return plain and isinstance(module.padding, tuple)


def rows_of(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What multiplies ``layer.weight.flatten(1)``, a row per position: (R, d)."""
    if isinstance(layer, nn.Conv2d):
        assert isinstance(layer.padding, tuple), "chosen by matrix_layers"
        patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return patches.mT.reshape(-1, patches.shape[1])
    return inputs.reshape(-1, inputs.shape[-1])


def as_in_evaluation(module: nn.Module, _: Any) -> None:
    """A hook before a forward: batch normalisation takes its running statistics."""
    module.training = False


@contextlib.contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Batch normalisation whose gain and shift are frozen keeps its statistics while open."""
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            own = [parameter.requires_grad for parameter in module.parameters()]
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and own and not any(own):
                hooks.enter_context(module.register_forward_pre_hook(as_in_evaluation))
        yield


@contextlib.contextmanager
def _watching(
    layers: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Shows the input of each layer's forward while open."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args: see(name, args[0].detach())

    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(hook(name)))
        yield


@torch.no_grad()
def input_moments(
    task: UnlearnTask, layers: Mapping[str, nn.Module], indices: np.ndarray
) -> dict[str, Tensor]:
    """Layer -> sum of x x^T over its inputs x at all positions, (d, d) float64, in eval mode.

    Its eigenvectors are the left singular vectors of the inputs, its eigenvalues the squares of
    their singular values.  A layer that the forward does not call is left out.
    """
    moments: dict[str, Tensor] = {}

    def see(name: str, inputs: Tensor) -> None:
        rows = rows_of(layers[name], inputs).double()
        moments[name] = moments.get(name, 0) + rows.mT @ rows

    with evaluating(task.model), _watching(layers, see):
        for batch in ordered_batches(task.source, indices, EVALUATION_BATCH):
            task.forward(task.model, batch)
    return moments


def spectrum(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (d,) of a moment matrix, falling and not negative, and eigenvectors (d, d)."""
    try:
        values, vectors = torch.linalg.eigh(moment)
    except RuntimeError:  # LAPACK may give up where many are 0: units that never fire
        vectors, values, _ = torch.linalg.svd(moment)
        return values, vectors
    return values.flip(0).clamp_min(0), vectors.flip(1)


@torch.no_grad()
def head_inputs(task: UnlearnTask, name: str, indices: np.ndarray) -> tuple[Tensor, Tensor]:
    """(N, d) inputs of the linear layer ``name`` in eval mode, and (N,) labels.

    Raises:
        ConfigError: Samples have more than one label each.
    """
    features: list[Tensor] = []
    labels: list[Tensor] = []
    head = {name: task.model.get_submodule(name)}
    with (
        evaluating(task.model),
        _watching(head, lambda _, inputs: features.append(inputs)),
    ):
        for batch in ordered_batches(task.source, indices, EVALUATION_BATCH):
            if batch.labels.ndim != 1:
                raise ConfigError(
                    f"the features of {name} are read for samples of one label each; choose "
                    "another method for these data"
                )
            task.forward(task.model, batch)
            labels.append(batch.labels)
    return torch.cat(features), torch.cat(labels)
