"""Protocols between the training loop and its callers, and the result of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from common.data.batch import Batch

ModelForward = Callable[[nn.Module, Batch], Tensor]
AfterStep = Callable[[nn.Module], Mapping[str, float] | None]
Watch = Callable[[nn.Module, int], Mapping[str, float | None]]
"""(model in eval mode, steps done) -> metrics."""


class ScalarSink(Protocol):
    """Where scalars go; see :class:`common.train.tracking.Tracker`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named values at a step."""


class Stateful(Protocol):
    """Something whose tensors belong into a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state."""


@dataclass
class FitResult:
    """What a finished run cost and how it ended."""

    steps: int
    seconds: float
    last: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
