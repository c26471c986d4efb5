"""Guarded views of source and split: a method sees the parts that it declares, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import AccessError
from stable_forgetting.common.data.batch import (
    AnsweringSource,
    Batch,
    BoundedSource,
    Bounds,
    Source,
    class_labels,
    every_position,
)
from stable_forgetting.common.data.parts import PadTo
from stable_forgetting.common.data.splits import ForgetSplit


class Reads:
    """How many samples of each part a method was given; its state goes into checkpoints.

    The same tensor of indices asked for again at once is another view of one batch: it counts once.
    """

    def __init__(self, split: ForgetSplit):
        self._names = list(split.parts)
        self._sizes = [len(ids) for ids in split.parts.values()]
        size = max((int(ids.max()) + 1 for ids in split.parts.values() if len(ids)), default=0)
        # the two last entries stand for whatever lies outside
        self._part = torch.full((size + 2,), len(self._names))
        for number, ids in enumerate(split.parts.values()):
            self._part[torch.as_tensor(ids)] = number
        self.counts = torch.zeros(len(self._names), dtype=torch.int64)
        self._last: Tensor | None = None

    def parts(self, indices: Tensor) -> Tensor:
        """(N,) places of samples' parts among those of the split, one more for none of them."""
        return self._part[indices.clamp(-1, len(self._part) - 2)]

    def add(self, indices: Tensor) -> None:
        """Counts samples of the split, (N,) int64."""
        if indices is not self._last:
            self.counts += torch.bincount(self.parts(indices), minlength=len(self._names))
        self._last = indices

    def samples(self, part: str) -> int:
        """Samples of a part that were read, each as often as it was; 0 of one that is not there."""
        return int(self.counts[self._names.index(part)]) if part in self._names else 0

    def passes(self, part: str) -> float:
        """The same over the size of the part."""
        read = self.samples(part)
        return read / self._sizes[self._names.index(part)] if read else 0.0

    def join(self, before: Tensor) -> None:
        """Adds what the other processes were given since the counts were ``before``."""
        self.counts = before + sum(processes.gathered(self.counts - before))

    def state(self) -> dict[str, Tensor]:
        """The counts."""
        return {"counts": self.counts.clone()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over the counts of a :meth:`state`."""
        self.counts = state["counts"].clone()


class DataAccess:
    """Source and split of a run, as far as a method may see them.

    Attributes:
        source: Gives out samples of declared parts alone.
        split: Shows declared parts alone.
        reads: How many samples were given out.
        violations: Parts whose samples were asked for without being declared, in order, even where
            the method caught the error.
    """

    def __init__(
        self,
        source: Source,
        split: ForgetSplit,
        declared: frozenset[str],
        method: str = "method",
        reads: Reads | None = None,
    ):
        self.declared, self.method = declared, method
        self.violations: list[str] = []
        self.reads = reads or Reads(split)
        self._whole = source, split
        self._permitted = torch.tensor([*(part in declared for part in split.parts), False])
        self.split = GuardedSplit(split, self)
        self.source = GuardedSource(source, self)

    def narrowed(self, parts: frozenset[str]) -> DataAccess:
        """The same data for a method that declares fewer parts."""
        source, split = self._whole
        return DataAccess(source, split, self.declared & parts, self.method, self.reads)

    def require(self, *parts: str) -> None:
        """Checks that parts are declared.

        Raises:
            AccessError: One is not.
        """
        for part in parts:
            if part not in self.declared:
                self._refuse(part)

    def check(self, indices: Tensor) -> None:
        """Checks that samples, (N,) int64, belong to declared parts.

        Raises:
            AccessError: One does not.
        """
        parts = self.reads.parts(indices)
        permitted = self._permitted[parts]
        if not bool(permitted.all()):
            names = [*self._whole[1].parts, "no part of the split"]
            self._refuse(names[int(parts[~permitted][0])])

    def _refuse(self, part: str) -> None:
        self.violations.append(part)
        raise AccessError(
            f"method '{self.method}' reads '{part}', which it does not declare; declare it in "
            f"MethodInfo.access (now: {', '.join(sorted(self.declared)) or 'nothing'})"
        )


class GuardedSplit:
    """The declared parts of a split.

    Attributes:
        parts: Part -> sorted int64 indices; asking for any other part raises
            :class:`AccessError`.
        notes: Facts for people.
    """

    def __init__(self, split: ForgetSplit, access: DataAccess):
        self.name, self.notes = split.name, split.notes
        self.parts: Mapping[str, np.ndarray] = _GuardedParts(split.parts, access)


class _GuardedParts(Mapping[str, np.ndarray]):
    def __init__(self, parts: Mapping[str, np.ndarray], access: DataAccess):
        self._parts, self._access = parts, access

    def __getitem__(self, part: str) -> np.ndarray:
        self._access.require(part)
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return (part for part in self._parts if part in self._access.declared)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class GuardedSource:
    """A source that gives out samples of declared parts alone.

    It offers what the source behind it offers; where that lacks something, the neutral answer.
    """

    def __init__(self, source: Source, access: DataAccess):
        self._source, self._access = source, access

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return self._source.digest

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The samples at ``indices``.

        Raises:
            AccessError: One belongs to a part that the method does not declare.
        """
        self._access.check(indices)
        self._access.reads.add(indices)
        return self._source.fetch(indices, augment=augment)

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        """(N,) int64 class of each sample, of which nothing else is given out.

        Raises:
            AccessError: One belongs to a part that the method does not declare.
            DataError: The samples have no class.
        """
        self._access.check(torch.as_tensor(indices))
        return class_labels(self._source, indices)

    @property
    def refusals(self) -> Sequence[Any]:
        """Answers that refuse; none where the source has none."""
        return self._source.refusals if isinstance(self._source, AnsweringSource) else ()

    def answers_of(self, indices: np.ndarray) -> Sequence[Any]:
        """The answers at (N,) int64 indices; none where the source has none.

        Raises:
            AccessError: One belongs to a part that the method does not declare.
        """
        self._access.check(torch.as_tensor(indices))
        if not isinstance(self._source, AnsweringSource):
            return ()
        return self._source.answers_of(indices)

    def with_answers(self, answers: Mapping[int, Any]) -> GuardedSource:
        """The same samples, with other answers at some indices; guarded likewise."""
        assert isinstance(self._source, AnsweringSource), "ask for refusals first"
        return GuardedSource(self._source.with_answers(answers), self._access)

    @property
    def input_bounds(self) -> Bounds | None:
        """Between which values inputs lie; None where that is not known."""
        return self._source.input_bounds if isinstance(self._source, BoundedSource) else None

    @property
    def blank_inputs(self) -> Mapping[str, Tensor]:
        """Values of what is masked out, as far as they are known."""
        return self._source.blank_inputs if isinstance(self._source, BoundedSource) else {}

    def everywhere(self, batch: Batch, pad_to: PadTo | None = None) -> Batch:
        """The batch with all positions counted, padding included."""
        return every_position(self._source, pad_to)(batch)
