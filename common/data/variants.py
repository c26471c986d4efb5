"""Splits derived from a split: halves for shadows, requests in turn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.parts import EARLIER
from stable_forgetting.common.data.splits import ForgetSplit


def half_split(split: ForgetSplit, seed: int, index: int) -> ForgetSplit:
    """A shadow's split: half of the forget set is forgotten, the other half never seen.

    Splits 2j and 2j + 1 hold complementary halves, so that over an even number of shadows every
    sample is on each side equally often.

    Args:
        split: The split that is audited.
        seed: Of the draw.
        index: Which shadow.

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

    Args:
        split: The split whose forget set is asked for bit by bit.
        labels: Indices -> (N,) class labels.
        seed: Of the order.
        index: Which request, from 0.
        count: Requests in all.

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
