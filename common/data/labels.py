"""Class labels of index sets, and which classes a request removes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.data.batch import LabelledSource, Source, ordered_batches


def class_labels(source: Source, indices: np.ndarray, batch_size: int = 256) -> np.ndarray:
    """(N,) int64 class of each sample; a :class:`LabelledSource` saves reading them.

    Raises:
        DataError: The labels are not one class per sample.
    """
    if isinstance(source, LabelledSource):
        return source.labels_of(indices)
    labels = [batch.labels for batch in ordered_batches(source, indices, batch_size)]
    if not labels:
        return np.zeros(0, dtype=np.int64)
    if any(batch.ndim != 1 for batch in labels):
        raise DataError("this needs one class label per sample; these are sequences")
    return torch.cat(labels).cpu().numpy().astype(np.int64)


def forgotten_classes(source: Source, forget: Any, retain: Any) -> list[int]:
    """Classes of the forget set that the retain set has no sample of, sorted."""
    return unretained_classes(source, class_labels(source, forget).tolist(), retain)


def unretained_classes(source: Source, classes: Iterable[int], retain: Any) -> list[int]:
    """Those of some classes that the retain set has no sample of, sorted.

    A source without labels of its own is read until it has shown them all.
    """
    gone = set(classes)
    if isinstance(source, LabelledSource):
        return sorted(gone - set(source.labels_of(np.asarray(retain)).tolist()))
    for batch in ordered_batches(source, retain, 256):
        gone -= set(batch.labels.flatten().tolist())
        if not gone:
            break
    return sorted(gone)
