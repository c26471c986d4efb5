"""SCRUB+R's rewinding: weights kept during a run, one set of them chosen at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.methods.tools.passes import labels_of, wrong

if TYPE_CHECKING:
    from stable_forgetting.common.data.loader import ChainedLoader
    from stable_forgetting.common.methods.task import UnlearnTask

HELD_OUT = ("validation", "validation_forget")


def class_shares(task: UnlearnTask) -> Tensor:
    """Shares of the classes in D_f, (C,), each of which must have held-out samples.

    Raises:
        DataError: One has none.
    """
    labels = labels_of(task, "forget")
    shares = labels.bincount(minlength=task.family.num_classes) / len(labels)
    held_out = _held_out(task)
    counts = torch.zeros(len(shares))
    if held_out:
        counts = labels_of(task, *held_out).bincount(minlength=len(shares))
    lacking = torch.where((counts == 0) & (shares > 0))[0].tolist()
    if lacking:
        raise DataError(
            f"scrub_r compares with held-out data of the forgotten classes, and class {lacking[0]} "
            "has none; give the data validation samples or take scrub"
        )
    return shares


def _held_out(task: UnlearnTask) -> list[str]:
    return [part for part in HELD_OUT if len(task.split.parts.get(part, ()))]


def reference_error(task: UnlearnTask, shares: Tensor) -> float:
    """Error of the model on held-out data, reweighted to the given class shares (C,)."""
    labels, errors = wrong(task, *_held_out(task))
    counts = labels.bincount(minlength=len(shares))
    misses = labels[errors].bincount(minlength=len(shares))
    return float((shares * misses / counts.clamp_min(1)).sum())


class Rewind:
    """Keeps what is trained, and its forget error, whenever the loader reaches an end.

    Args:
        task: Its model is watched.
        loader: Counts the batches given out.
        ends: Counts at which to keep the weights, ascending.

    Raises:
        DataError: A class of the forget set has no held-out sample.
    """

    def __init__(self, task: UnlearnTask, loader: ChainedLoader, ends: Sequence[int]):
        self.task, self.loader, self.ends = task, loader, list(ends)
        self.shares = class_shares(task)
        self.errors: list[float] = []
        self.copies: list[list[Tensor]] = []

    def _tensors(self) -> list[Tensor]:
        model: nn.Module = self.task.model
        return [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]

    def __call__(self, model: nn.Module) -> dict[str, float] | None:
        """After each step: keeps the weights if an end was reached."""
        if len(self.errors) == len(self.ends) or self.loader.count < self.ends[len(self.errors)]:
            return None
        _, errors = wrong(self.task, "forget")
        self.errors.append(float(errors.double().mean()))
        self.copies.append([tensor.detach().clone() for tensor in self._tensors()])
        return {"rewind/forget_error": self.errors[-1]}

    @torch.no_grad()
    def choose(self) -> int:
        """Puts the chosen weights into the model; returns their place."""
        assert self.errors, "no epoch was completed"
        reference = reference_error(self.task, self.shares)
        gaps = [abs(error - reference) for error in self.errors]
        chosen = max(place for place, gap in enumerate(gaps) if gap == min(gaps))
        for tensor, value in zip(self._tensors(), self.copies[chosen], strict=True):
            tensor.copy_(value)
        return chosen

    def state(self) -> dict[str, Tensor]:
        """Errors and weights so far."""
        state = {"errors": torch.tensor(self.errors, dtype=torch.float64)}
        for place, tensors in enumerate(self.copies):
            state |= {f"{place}-{k}": tensor for k, tensor in enumerate(tensors)}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.errors = state["errors"].tolist()
        width = len(self._tensors())
        device = self._tensors()[0].device
        self.copies = [
            [state[f"{place}-{k}"].to(device).clone() for k in range(width)]
            for place in range(len(self.errors))
        ]
