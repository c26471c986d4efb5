"""UNSIR's error-maximising noise, learnt by the engine: the noise is the model that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.methods.tools.objectives import continuous
from stable_forgetting.common.objectives.objectives import ObjectiveValue
from stable_forgetting.common.objectives.positions import sample_cross_entropy
from stable_forgetting.common.train.config import FitConfig


class _Noise(nn.Module):
    """Inputs as parameters, in front of a frozen model that is no part of the module tree."""

    def __init__(self, model: nn.Module, start: Mapping[str, Tensor]):
        super().__init__()
        self._frozen = (model,)  # a tuple hides it from parameters() and train()
        self.inputs = nn.ParameterDict({k: nn.Parameter(v) for k, v in start.items()})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits: Tensor = self._frozen[0](*args, **kwargs)
        return logits


@dataclass(frozen=True)
class _Repel:
    """-CE(f(noise), label) + decay * mean squared norm of a noise sample."""

    noise: _Noise
    label: int
    decay: float
    parts: tuple[str, ...] = ()

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        inputs = dict(self.noise.inputs.items())
        size = len(next(iter(inputs.values())))
        device = next(iter(inputs.values())).device
        labels = torch.full((size,), self.label, device=device)
        loss = sample_cross_entropy(
            forward(Batch(inputs, labels, torch.arange(size))), labels
        ).mean()
        squares = [tensor.flatten(1).square().sum(1) for tensor in inputs.values()]
        norm = torch.stack(squares).sum(0).mean()
        return ObjectiveValue(self.decay * norm - loss, {"noise_loss": loss, "noise_norm": norm})


def learn_noise(
    task: UnlearnTask, classes: list[int], *, samples: int, config: FitConfig, decay: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Noise inputs and labels of all classes.

    Args:
        task: Its model is the one to be repelled; it is not changed.
        classes: One set of noise each.
        samples: Noise samples per class, M.
        config: Length and rate.
        decay: Weight of the squared norm.

    Returns:
        Name -> (len(classes) * M, ...) and (len(classes) * M,) int64, on the source's device.
    """
    example = task.source.fetch(torch.as_tensor(task.indices("retain")[:1]))
    continuous(example, "unsir")
    inputs: dict[str, list[Tensor]] = {name: [] for name in example.inputs}
    for label in classes:
        stream = task.generator("noise", label)
        start = {
            name: torch.randn(samples, *tensor.shape[1:], generator=stream).to(tensor)
            for name, tensor in example.inputs.items()
        }
        noise = _Noise(task.frozen_copy(), start)
        task.fit(noise, _Repel(noise, label, decay), {}, config, more=True)
        for name, tensor in noise.inputs.items():
            inputs[name].append(tensor.detach())
    labels = torch.tensor(classes, device=example.labels.device).repeat_interleave(samples)
    return {name: torch.cat(tensors) for name, tensors in inputs.items()}, labels
