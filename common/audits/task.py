"""What an audit is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.audits.measure import NotApplicable
from common.base.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from common.data.batch import Batch, Source
    from common.data.splits import ForgetSplit
    from common.measure.scores import Scores
    from common.train.config import FitConfig


@dataclass
class AuditTask:
    """One stored model, and what is needed to probe it.

    Attributes:
        load: Makes a fresh copy of the stored model, adapters merged.
        load_original: Makes a fresh copy of the model before unlearning.
        adapted: Whether the stored model is an adapter beside Original's weights.
        source: The modality's data source.
        split: The frozen index sets.
        forward: (model, batch) -> logits.
        collect: (model, indices) -> scores; puts the model into eval mode.
        features: (model, batch) -> (N, d) penultimate features; None takes the head's input.
        head: Parameter-name patterns of the classifier head.
        recipe: How Original was trained.
        num_classes: Width of the logits.
        batch_size: Samples per forward.
        seed: Of draws.
    """

    load: Callable[[], nn.Module]
    load_original: Callable[[], nn.Module]
    adapted: bool
    source: Source
    split: ForgetSplit
    forward: Callable[[nn.Module, Batch], Tensor]
    collect: Callable[[nn.Module, np.ndarray], Scores]
    features: Callable[[nn.Module, Batch], Tensor] | None
    head: Sequence[str]
    recipe: FitConfig
    num_classes: int
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
