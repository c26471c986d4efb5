"""Frozen, hashed index sets: what is forgotten, retained, held out.

One :class:`ForgetSplit` is shared by every stage of a seed, so Original, Retrain, methods and
evaluation cannot disagree on who was trained on what.  (In the code that most vision papers
descend from, about 10 % of the forget set was never seen by the Original model.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.parts import EARLIER, LATER, UNUSED

TRAIN_PARTS = ("forget", "retain")


@dataclass(frozen=True)
class ForgetSplit:
    """Named, disjoint index sets into one data source.

    Attributes:
        name: Human name, such as ``digits/class-3/seed-1``.
        parts: Part name -> sorted int64 indices.  ``forget`` and ``retain`` are what Original was
            trained on; ``validation`` chooses hyperparameters; ``test`` only reports.
        source_digest: Digest of the data source that the indices point into.
        notes: Facts about the split for people, such as the forgotten classes.
    """

    required: ClassVar[tuple[str, ...]] = TRAIN_PARTS

    name: str
    parts: Mapping[str, np.ndarray]
    source_digest: str
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in self.required:
            if part not in self.parts or len(self.parts[part]) == 0:
                raise DataError(f"split {self.name}: part '{part}' is empty; change the scenario")
        seen: dict[int, str] = {}
        for part, indices in self.parts.items():
            if indices.dtype != np.int64 or indices.ndim != 1:
                raise DataError(f"split {self.name}: part '{part}' must be one row of int64")
            for index in indices.tolist():
                if index in seen:
                    raise DataError(
                        f"split {self.name}: index {index} is in '{seen[index]}' and '{part}'"
                    )
                seen[index] = part

    @property
    def digest(self) -> str:
        """SHA-256 over part names, indices and the source digest."""
        state = hashlib.sha256(self.source_digest.encode())
        for part in sorted(self.parts):
            state.update(part.encode() + b"\0")
            state.update(np.ascontiguousarray(self.parts[part], dtype="<i8").tobytes())
        return state.hexdigest()

    @property
    def train(self) -> np.ndarray:
        """What Original was trained on: all :attr:`train_parts` together, sorted."""
        return self.union(self.train_parts)

    @property
    def train_parts(self) -> tuple[str, ...]:
        """The parts that Original was trained on."""
        every = (*TRAIN_PARTS, EARLIER, LATER, UNUSED)
        return tuple(part for part in every if part in self.parts)

    @property
    def kept_parts(self) -> tuple[str, ...]:
        """The parts that Retrain is trained on: nobody asked to forget them so far."""
        return tuple(part for part in ("retain", LATER) if part in self.parts)

    def union(self, parts: Sequence[str]) -> np.ndarray:
        """The indices of several parts together, sorted."""
        return np.sort(np.concatenate([self.parts[part] for part in parts]))

    def save(self, path: Path) -> None:
        """Writes safetensors with the name, notes and source digest as metadata."""
        metadata = {f"note.{key}": value for key, value in self.notes.items()}
        metadata |= {"name": self.name, "source_digest": self.source_digest, "digest": self.digest}
        save_file(
            {part: np.ascontiguousarray(ids) for part, ids in self.parts.items()},
            path,
            metadata=metadata,
        )

    @classmethod
    def load(cls, path: Path) -> ForgetSplit:
        """Reads and verifies a saved split."""
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                parts = {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118
            notes = {k.removeprefix("note."): v for k, v in metadata.items() if k[:5] == "note."}
            split = cls(metadata["name"], parts, metadata["source_digest"], notes)
            intact = split.digest == metadata["digest"]
        except (SafetensorError, KeyError, OSError) as error:
            raise DataError(
                f"{path}: not a readable split ({error}); delete it and rerun"
            ) from None
        if not intact:
            raise DataError(f"{path}: indices do not match their digest; delete it and rerun")
        return split


def unseen_split(split: ForgetSplit, part: str) -> ForgetSplit:
    """The split with another of its parts in the place of the forget set, which is in none.

    Raises:
        DataError: There is no such part.
    """
    if part not in split.parts:
        raise DataError(
            f"split {split.name}: no part '{part}', whose samples no training saw; leave out "
            "tune.select"
        )
    parts = {name: ids for name, ids in split.parts.items() if name != part}
    parts["forget"] = split.parts[part]
    return ForgetSplit(f"{split.name}/{part}", parts, split.source_digest, split.notes)


class PretrainingSplit(ForgetSplit):
    """Index sets of a pretraining, of which nothing is forgotten: ``train``, and ``test`` aside."""

    required = ("train", "test")

    @property
    def train_parts(self) -> tuple[str, ...]:
        """``train``."""
        return ("train",)


def random_forget(train: Sequence[int], fraction: float, seed: int) -> np.ndarray:
    """``round(fraction * len(train))`` indices drawn without replacement by hash order."""
    count = round(fraction * len(train))
    return np.sort(hash_order(train, seed, "forget")[:count])


def class_forget(train: np.ndarray, labels: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """All of ``train`` whose label (``labels`` indexed by data index) is in ``classes``."""
    return train[np.isin(labels[train], np.asarray(classes))]


def balanced_draw(
    indices: np.ndarray, labels: np.ndarray, count: int, seed: int, *names: str | int
) -> np.ndarray:
    """Up to ``count`` of ``indices``, as even over labels as they allow, by hash order.

    Args:
        indices: Candidates, int64.
        labels: Label of every data index (not only of the candidates).
        *names: Further names of the stream.
    """
    ordered = hash_order(indices, seed, *names)
    rank_in_class = np.zeros(len(ordered), dtype=np.int64)
    seen: dict[int, int] = {}
    for position, index in enumerate(ordered):
        label = int(labels[index])
        rank_in_class[position] = seen.get(label, 0)
        seen[label] = seen.get(label, 0) + 1
    chosen = np.argsort(rank_in_class, kind="stable")[:count]
    return np.sort(ordered[chosen])


def ids_digest(ids: np.ndarray) -> str:
    """SHA-256 of a set of indices."""
    return hashlib.sha256(np.ascontiguousarray(np.sort(ids), dtype="<i8").tobytes()).hexdigest()


def half_split(split: ForgetSplit, seed: int, index: int) -> ForgetSplit:
    """A shadow's split: half of the forget set is forgotten, the other half never seen.

    Splits 2j and 2j + 1 hold complementary halves, so that over an even number of shadows every
    sample is on each side equally often.

    Returns:
        Its parts with ``forget`` halved and ``forget_out``, the half that nothing trains on.
    """
    ordered = hash_order(split.parts["forget"], seed, "half", index // 2)
    middle = len(ordered) // 2
    halves = [np.sort(ordered[:middle]), np.sort(ordered[middle:])]
    if index % 2:
        halves.reverse()
    parts = {**split.parts, "forget": halves[0], "forget_out": halves[1]}
    return ForgetSplit(f"{split.name}/half-{index}", parts, split.source_digest, split.notes)


def request_split(
    split: ForgetSplit,
    labels: Callable[[np.ndarray], np.ndarray],
    seed: int,
    index: int,
    count: int,
) -> ForgetSplit:
    """One of ``count`` forget requests that come in turn and add up to a split's forget set.

    Whole classes are dealt out by class, other forget sets by hash order.

    Returns:
        ``forget``: this request; ``retain``: also what later requests will ask for; ``earlier``:
        what the ones before asked for.  Where classes go, ``test_forget``, ``test`` and
        ``test_earlier`` likewise.

    Raises:
        DataError: There are fewer classes or samples than requests.
    """
    forget, groups = split.parts["forget"], _requests(split, labels, seed, count)
    of = {int(i): k for k, members in enumerate(groups) for i in members}
    parts = dict(split.parts)
    when = np.array([of[int(i)] for i in forget])
    parts |= _in_turn(forget, when, split.parts["retain"], index, "retain", "forget", EARLIER)
    if "test_forget" in parts:
        held_out, classes = parts["test_forget"], labels(forget)
        turn = {int(label): int(when[classes == label][0]) for label in np.unique(classes)}
        when = np.array([turn[int(label)] for label in labels(held_out)])
        names = ("test", "test_forget", "test_earlier")
        parts |= _in_turn(held_out, when, parts["test"], index, *names)
    parts = {name: ids for name, ids in parts.items() if len(ids)}
    name = f"{split.name}/request-{index + 1}-of-{count}"
    return ForgetSplit(name, parts, split.source_digest, split.notes)


def _in_turn(
    indices: np.ndarray, when: np.ndarray, rest: np.ndarray, index: int, *names: str
) -> dict[str, np.ndarray]:
    """(retain, forget, earlier) under ``names``; retain is ``rest`` and the later requests."""
    retain = np.sort(np.concatenate([rest, indices[when > index]]))
    return dict(zip(names, (retain, indices[when == index], indices[when < index]), strict=True))


def _requests(
    split: ForgetSplit, labels: Callable[[np.ndarray], np.ndarray], seed: int, count: int
) -> list[np.ndarray]:
    """The forget set in ``count`` groups, in the order of the requests."""
    forget = split.parts["forget"]
    if "test_forget" in split.parts:
        classes = labels(forget)
        turns = np.array_split(hash_order(np.unique(classes), seed, "requests"), count)
        groups = [forget[np.isin(classes, turn)] for turn in turns]
    else:
        groups = np.array_split(hash_order(forget, seed, "requests"), count)
    if not all(len(group) for group in groups):
        raise DataError(
            f"split {split.name}: {count} requests need as many forgotten classes (or samples); "
            "ask for fewer, or forget more classes (scenario.num_classes)"
        )
    return groups
