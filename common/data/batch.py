"""Batches and sources: what every modality provides, what a source may offer, class labels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.data.parts import PadTo

IGNORE = -100
"""The label of a position that counts for nothing."""


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on a device; to a card from pinned memory, so that nothing waits for it."""
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        inputs: What the model's ``forward`` takes, by name; every tensor is batch-first.
        labels: Int64 targets: (N,) for classes, (N, T) with -100 where ignored for sequences.
        indices: (N,) int64, CPU: where the samples sit in the source.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def with_labels(self, labels: Tensor) -> Batch:
        """The same inputs with other labels."""
        return Batch(self.inputs, labels, self.indices)

    def slice(self, start: int, stop: int) -> Batch:
        """Samples ``start`` to ``stop``."""
        inputs = {name: tensor[start:stop] for name, tensor in self.inputs.items()}
        return Batch(inputs, self.labels[start:stop], self.indices[start:stop])


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Batches with equal sample shapes as one."""
    names = batches[0].inputs
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in names}
    labels = torch.cat([batch.labels for batch in batches])
    return Batch(inputs, labels, torch.cat([batch.indices for batch in batches]))


class Source(Protocol):
    """Where samples come from; implemented by each modality."""

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The samples at ``indices`` (int64, CPU), on the source's device.

        With a generator, training augmentation is drawn from it; without, none is applied.
        """


def ordered_batches(source: Source, indices: Any, batch_size: int) -> Iterator[Batch]:
    """Every sample once, in order, without augmentation: for evaluation."""
    ids = torch.as_tensor(np.asarray(indices, dtype=np.int64))
    for start in range(0, len(ids), batch_size):
        yield source.fetch(ids[start : start + batch_size])


Forward = Callable[[Batch], Tensor]
"""Batch -> logits: (N, C) or (N, T, C), aligned with the batch's labels."""


Bounds = Mapping[str, tuple[Tensor, Tensor]]
"""Input name -> (low, high), which broadcast over a sample."""


@runtime_checkable
class AnsweringSource(Protocol):
    """Its answers can be read and replaced; methods that train on other answers need one."""

    @property
    def refusals(self) -> Sequence[Any]:
        """Answers that refuse; possibly none."""

    def answers_of(self, indices: np.ndarray) -> Sequence[Any]:
        """The answers at (N,) int64 indices, as :meth:`with_answers` takes them."""

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

    def everywhere(self, batch: Batch, pad_to: PadTo | None = None) -> Batch:
        """The batch with all positions counted."""


def every_position(source: object, pad_to: PadTo | None = None) -> Callable[[Batch], Batch]:
    """What turns a batch into one whose every position counts, padding included.

    Published code that forgets its mask averages over these.  Where a source has no masks, a
    sample has one position, which counts.
    """
    if not isinstance(source, UnmaskedSource):
        return lambda batch: batch
    return source.everywhere if pad_to is None else partial(source.everywhere, pad_to=pad_to)


def predicting(batch: Batch) -> Batch:
    """Without the last position, which predicts nothing; samples of one position stay."""
    if batch.labels.ndim == 1:
        return batch
    inputs = {k: v[:, :-1] if k == "positions" else v for k, v in batch.inputs.items()}
    return Batch(inputs, batch.labels[:, :-1], batch.indices)


def with_labels_of(whole: Batch, batch: Batch) -> Batch:
    """A batch whose every position counts with the labels of its masked form, -100 elsewhere."""
    if batch.labels.ndim == 1:
        return whole
    places = batch.inputs["positions"]
    # places that are padded repeat, with nothing to add
    labels = torch.full_like(whole.labels, IGNORE).scatter_add(1, places, batch.labels - IGNORE)
    return whole.with_labels(labels)


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


class DatasetSource:
    """Samples of a map-style dataset of (input, class) pairs; the inputs have one shape.

    Args:
        dataset: Its own transform is applied at every fetch, and is all the augmentation there is.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device | str = "cpu"):
        self.dataset, self.device = dataset, torch.device(device)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all samples as they come; reads the whole dataset once."""
        state = hashlib.sha256()
        for index in range(len(self.dataset)):  # type: ignore[arg-type]
            x, y = self.dataset[index]
            state.update(torch.as_tensor(x).cpu().contiguous().numpy().tobytes())
            state.update(str(int(y)).encode())
        return state.hexdigest()

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """Inputs under the name ``x``, and int64 labels."""
        pairs = [self.dataset[index] for index in indices.tolist()]
        inputs = torch.stack([torch.as_tensor(x) for x, _ in pairs])
        labels = torch.tensor([int(y) for _, y in pairs])
        moved = {"x": to_device(inputs, self.device)}
        return Batch(moved, to_device(labels, self.device), indices)
