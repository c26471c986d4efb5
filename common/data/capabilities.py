"""What a source may offer beyond its samples; methods ask by ``isinstance``, never by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from common.data.batch import Batch, Source

Bounds = Mapping[str, tuple[Tensor, Tensor]]
"""Input name -> (low, high), which broadcast over a sample."""


@runtime_checkable
class AnsweringSource(Protocol):
    """Its answers can be replaced; methods that train on refusals need one."""

    @property
    def refusals(self) -> Sequence[Any]:
        """Answers that refuse; possibly none."""

    def with_answers(self, answers: Mapping[int, Any]) -> Source:
        """The same samples, with other answers at some indices."""


@runtime_checkable
class LabelledSource(Protocol):
    """It knows classes without making batches."""

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        """(N,) int64 class of each sample."""


@runtime_checkable
class BoundedSource(Protocol):
    """It knows between which values its inputs lie, and which value means nothing."""

    @property
    def input_bounds(self) -> Bounds | None:
        """Smallest and largest value; None where there is no limit."""

    @property
    def blank_inputs(self) -> Mapping[str, Tensor]:
        """Input name -> value of what is masked out; broadcasts over a sample."""


@runtime_checkable
class UnmaskedSource(Protocol):
    """It can make every position of a batch count, padding included."""

    def everywhere(self, batch: Batch) -> Batch:
        """The batch with all positions counted."""


def every_position(source: object) -> Callable[[Batch], Batch]:
    """What turns a batch into one whose every position counts, padding included.

    Published code that forgets its mask averages over these.  Where a source has no masks, a
    sample has one position, which counts.
    """
    return source.everywhere if isinstance(source, UnmaskedSource) else lambda batch: batch
