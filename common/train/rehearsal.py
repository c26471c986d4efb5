"""A rehearsal of a training: its ends alone, on a few samples, at the rates of the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stable_forgetting.common import data
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.data.splits import ForgetSplit


class Rehearsal(Strict):
    """How much of every training and of every part of the data is left.

    Attributes:
        rows: Samples of a part that are left: the first and the last ones; of held-out parts
            besides one of each class that is forgotten.
        ends: Optimizer steps that are taken at either end of a training.
        micro_batch: Samples per forward in training, at most.
        accumulation: Forwards per optimizer step, at most.
        samples: Part -> samples of the real data, where those that are read stand for others.
    """

    rows: Count = 8
    ends: Count = 2
    micro_batch: Count = 2
    accumulation: Count = 2
    samples: dict[str, int] = {}

    def cut(self, split: ForgetSplit, source: Any = None) -> tuple[ForgetSplit, Ends]:
        """A split with a few samples of each part, and what they stand for."""
        parts: dict[str, np.ndarray] = {}
        stands_for: dict[int, float] = {}
        for part, ids in split.parts.items():
            few = self._few(ids)
            if isinstance(source, data.LabelledSource) and part.startswith("validation"):
                wanted = source.labels_of(self._few(split.parts["forget"]))
                classes = source.labels_of(ids)
                firsts = [ids[classes == label][:1] for label in np.unique(wanted)]
                few = np.unique(np.concatenate([few, *firsts]))
            share = self.samples.get(part, len(ids)) / max(1, len(few))
            parts[part] = few
            stands_for |= dict.fromkeys(few.tolist(), share)
        return replace(split, parts=parts), Ends(self, stands_for)

    def _few(self, ids: np.ndarray) -> np.ndarray:
        if len(ids) <= self.rows:
            return ids
        return np.concatenate([ids[: self.rows // 2], ids[-(self.rows - self.rows // 2) :]])


@dataclass(frozen=True)
class Ends:
    """What a training does in a rehearsal."""

    rehearsal: Rehearsal
    stands_for: Mapping[int, float]

    def samples(self, indices: np.ndarray) -> int:
        """Samples of the real set that an index set stands for."""
        return round(sum(self.stands_for.get(index, 1.0) for index in indices.tolist()))

    def prepare(self, loaders: Mapping[str, data.Loader]) -> None:
        """Makes loaders count the epochs of the real data, in small batches."""
        for loader in loaders.values():
            loader.stand_for(self.samples, self.rehearsal.micro_batch)

    def after(self, step: int, total: int) -> int:
        """The step that follows ``step`` of ``total``: the middle is left out."""
        ends = self.rehearsal.ends
        return max(step + 1, total - ends) if step + 1 == ends else step + 1
