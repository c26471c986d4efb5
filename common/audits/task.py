"""What an audit is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from common.audits.measure import NotApplicable
from common.base.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from common.data.batch import Batch, Source
    from common.data.splits import ForgetSplit
    from common.measure.scores import Scores
    from common.protocol.benchmark import ModelFamily
    from common.train.config import FitConfig


@runtime_checkable
class Featured(Protocol):
    """A benchmark that says which features enter the head."""

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N, d) penultimate features."""


@dataclass
class AuditTask:
    """One stored model, and what is needed to probe it.

    Attributes:
        load: Makes a fresh copy of the stored model, adapters merged.
        load_original: Makes a fresh copy of the model before unlearning.
        adapted: Whether the stored model is an adapter beside Original's weights.
        source: The modality's data source.
        split: The frozen index sets.
        family: What is known of the model: forward, logits, head.
        collect: (model, indices) -> scores; puts the model into eval mode.
        features: (model, batch) -> (N, d) penultimate features; None takes the head's input.
        recipe: How Original was trained.
        batch_size: Samples per forward.
        seed: Of draws.
    """

    load: Callable[[], nn.Module]
    load_original: Callable[[], nn.Module]
    adapted: bool
    source: Source
    split: ForgetSplit
    family: ModelFamily
    collect: Callable[[nn.Module, np.ndarray], Scores]
    features: Callable[[nn.Module, Batch], Tensor] | None
    recipe: FitConfig
    batch_size: int
    seed: int

    def draw(self, part: str, count: int | None, *names: str) -> np.ndarray:
        """Up to ``count`` indices of a part by hash order, sorted; all if None."""
        import numpy as np

        from common.base.seeding import hash_order

        indices = self.split.parts[part]
        if count is None or count >= len(indices):
            return indices
        return np.sort(hash_order(indices, self.seed, "audit", part, *names)[:count])

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """(N,) int64 class labels of samples.

        Raises:
            NotApplicable: The labels are not one class per sample.
        """
        from common.data.labels import class_labels

        try:
            return class_labels(self.source, indices, self.batch_size)
        except DataError as error:
            raise NotApplicable(str(error)) from None

    def forgotten_classes(self) -> np.ndarray:
        """Classes of which nothing is retained, sorted.

        Raises:
            NotApplicable: There are none: the forget set is not whole classes.
        """
        return whole_classes(*(self.labels(self.split.parts[p]) for p in ("forget", "retain")))


def whole_classes(forget: np.ndarray, retain: np.ndarray) -> np.ndarray:
    """Classes of the forget labels, sorted, of which nothing is retained.

    Raises:
        NotApplicable: There are none, or some are retained in part.
    """
    import numpy as np

    classes = np.unique(forget)
    if not len(classes) or np.isin(classes, retain).any():
        raise NotApplicable("only where whole classes are forgotten")
    return classes
