"""Per-sample gradients and Jacobians of chosen parameters, for methods in closed form.

Everything is evaluated in eval mode and without augmentation, a chunk of samples at a time: the
memory is ``chunk`` (times the outputs, for a Jacobian) x parameters, so a ViT-S needs a small chunk
or a subset of its parameters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from stable_forgetting.common.base.errors import ConfigError, Diverged
from stable_forgetting.common.data.batch import Batch, Source, ordered_batches
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives.positions import sample_cross_entropy, wide
from stable_forgetting.common.train.protocols import ModelForward


class _OfOneSample(nn.Module):
    """Inputs of one sample (no batch axis) -> its logits."""

    def __init__(self, model: nn.Module, forward: ModelForward):
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        one = {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}
        nothing = torch.zeros(1, dtype=torch.int64)
        return self._forward(self.model, Batch(one, nothing, nothing))[0]


class SampleGradients:
    """Gradients with respect to the parameters that match ``patterns``, as flat vectors.

    Vectors are float32 or wider: in bfloat16 a sum stops growing after some hundred samples.

    Args:
        task: Its model is put into eval mode; parameters are read at the time of each call.
        patterns: Glob patterns of parameter names; P is the number of entries that match.  Frozen
            parameters are left out.
        chunk: Samples per vectorised call.

    Raises:
        ConfigError: No parameter matches.
    """

    def __init__(self, task: UnlearnTask, patterns: Sequence[str] = ("*",), *, chunk: int = 16):
        self.model, self.forward, self.chunk = task.model.eval(), task.forward, chunk
        self.parameters = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
            and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        }
        if not self.parameters:
            raise ConfigError(f"parameters: none of this model matches {', '.join(patterns)}")
        self._call = _OfOneSample(self.model, self.forward)

    def flat(self) -> Tensor:
        """(P,) the parameters themselves."""
        return _flatten({name: p.detach() for name, p in self.parameters.items()}, 0)

    def write(self, flat: Tensor) -> None:
        """Sets the parameters from (P,).

        Raises:
            Diverged: A value is not finite.
        """
        if not bool(flat.isfinite().all()):
            raise Diverged(1, "the update is not finite")
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        with torch.no_grad():
            for parameter, values in zip(self.parameters.values(), flat.split(sizes), strict=True):
                parameter.copy_(values.view_as(parameter))

    def mean(self, source: Source, indices: np.ndarray, batch_size: int) -> Tensor:
        """(P,) gradient of the mean cross-entropy over an index set."""
        chosen = list(self.parameters.values())
        total = torch.zeros_like(self.flat())
        for batch in ordered_batches(source, indices, batch_size):
            loss = sample_cross_entropy(self.forward(self.model, batch), batch.labels).sum()
            parts = torch.autograd.grad(loss, chosen, allow_unused=True)
            pairs = zip(self.parameters, parts, chosen, strict=True)
            found = {n: torch.zeros_like(p) if g is None else g for n, g, p in pairs}
            total += _flatten(found, 0)
        return total / len(indices)

    def losses(self, batch: Batch, labels: Tensor | None = None) -> Iterator[Tensor]:
        """(<= chunk, P) gradients of each sample's cross-entropy, at other ``labels`` if given."""

        def loss(values: dict[str, Tensor], inputs: Any, label: Tensor) -> Tensor:
            logits = functional_call(self._call, values, (inputs,))
            return sample_cross_entropy(logits.unsqueeze(0), label.unsqueeze(0))[0]

        return self._chunks(vmap(grad(loss), in_dims=(None, 0, 0)), batch, labels, 1)

    def jacobians(self, batch: Batch, outputs: Tensor) -> Iterator[Tensor]:
        """(<= chunk, K, P) gradients of the logits named in ``outputs`` (N, K)."""

        def chosen(values: dict[str, Tensor], inputs: Any, wanted: Tensor) -> Tensor:
            logits: Tensor = functional_call(self._call, values, (inputs,))
            return logits.gather(0, wanted)

        return self._chunks(vmap(jacrev(chosen), in_dims=(None, 0, 0)), batch, outputs, 2)

    def _chunks(
        self, function: Any, batch: Batch, extra: Tensor | None, leading: int
    ) -> Iterator[Tensor]:
        values = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        extra = batch.labels if extra is None else extra
        for start in range(0, len(batch), self.chunk):
            part = batch.slice(start, start + self.chunk)
            given = extra[start : start + self.chunk]
            with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
                try:
                    jacobian = function(values, dict(part.inputs), given)
                except RuntimeError as error:
                    if "vmap" not in str(error):
                        raise
                    raise ConfigError(
                        "this model's forward decides by its data, so it has no gradients by "
                        "sample (torch.func.vmap refuses it); choose another method"
                    ) from None
            yield _flatten(jacobian, leading).detach()


def _flatten(tensors: Mapping[str, Tensor], leading: int) -> Tensor:
    """Tensors with ``leading`` common axes -> (..., P)."""
    return torch.cat(
        [wide(tensor).reshape(*tensor.shape[:leading], -1) for tensor in tensors.values()], -1
    )
