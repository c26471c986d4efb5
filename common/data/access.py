"""Guarded views of source and split: a method sees the parts that it declares, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.base.errors import AccessError
from common.data.batch import AnsweringSource, Batch, BoundedSource, Bounds, Source, every_position
from common.data.splits import ForgetSplit


class DataAccess:
    """Source and split of a run, as far as a method may see them.

    Args:
        source: The modality's data.
        split: The frozen index sets.
        declared: Parts that the method declares; ``initial`` stands for a fresh model.
        method: Its name, for errors.

    Attributes:
        source: Gives out samples of declared parts alone.
        split: Shows declared parts alone.
        violations: Parts whose samples were asked for without being declared, in order, even where
            the method caught the error.
    """

    def __init__(
        self, source: Source, split: ForgetSplit, declared: frozenset[str], method: str = "method"
    ):
        self.declared, self.method = declared, method
        self.violations: list[str] = []
        self._whole = source, split
        indices = [split.parts[part] for part in sorted(declared & split.parts.keys())]
        size = max((int(ids.max()) + 1 for ids in split.parts.values() if len(ids)), default=0)
        # the two last entries stand for whatever lies outside
        self._permitted = torch.zeros(size + 2, dtype=torch.bool)
        for ids in indices:
            self._permitted[torch.as_tensor(ids)] = True
        self.split = GuardedSplit(split, self)
        self.source = GuardedSource(source, self)

    def narrowed(self, parts: frozenset[str]) -> DataAccess:
        """The same data for a method that declares fewer parts."""
        source, split = self._whole
        return DataAccess(source, split, self.declared & parts, self.method)

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
        places = indices.clamp(-1, len(self._permitted) - 2)
        if not bool(self._permitted[places].all()):
            refused = indices[~self._permitted[places]].tolist()
            self._refuse(self._part_with(refused[0]))

    def _part_with(self, index: int) -> str:
        _, split = self._whole
        parts = (part for part, ids in split.parts.items() if index in ids)
        return next(parts, "no part of the split")

    def _refuse(self, part: str) -> None:
        self.violations.append(part)
        raise AccessError(
            f"method '{self.method}' reads '{part}', which it does not declare; declare it in "
            f"MethodInfo.access (now: {', '.join(sorted(self.declared)) or 'nothing'})"
        )


class GuardedSplit:
    """The declared parts of a split.

    Attributes:
        name: Of the split.
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
        return self._source.fetch(indices, augment=augment)

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

    def everywhere(self, batch: Batch) -> Batch:
        """The batch with all positions counted, padding included."""
        return every_position(self._source)(batch)
