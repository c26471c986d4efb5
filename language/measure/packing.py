"""Answers to one question in one row: the prompt once, then each answer as a branch behind it.

A token of a branch sees the prompt and its own branch, and has the position that it would have
alone, so the model computes what it would compute for every (prompt, answer) by itself.  The last
token of a sequence predicts nothing and is never fed.  No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stable_forgetting.language.data.corpus import Encoded


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch.

    Attributes:
        ids: (T,) int64 tokens.
        positions: (T,) int64, of each token in its own sequence.
        branch: (T,) int64: 0 for what all branches share, else the branch's number.
        pairs: Which pairs are in here.
        predictors: For each pair, where in the row its labels are predicted, int64.
    """

    ids: np.ndarray
    positions: np.ndarray
    branch: np.ndarray
    pairs: tuple[int, ...]
    predictors: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def packed(self) -> bool:
        """Whether it has branches, and so needs a mask of its own."""
        return bool(self.branch[-1])


def plain_rows(pairs: Sequence[Encoded]) -> list[Row]:
    """One row per pair."""
    return [_alone(index, pair) for index, pair in enumerate(pairs)]


def packed_rows(pairs: Sequence[Encoded], limit: int) -> list[Row]:
    """Pairs with one prompt share rows of at most ``limit`` tokens; what does not fit is alone."""
    questions: dict[bytes | int, list[int]] = {}
    for index, pair in enumerate(pairs):
        prompt = pair.ids[: pair.start - 1]
        questions.setdefault(prompt.tobytes() if len(prompt) else index, []).append(index)
    rows = []
    for members in questions.values():
        shared = _common_prefix([pairs[index].ids[:-1] for index in members])
        for chosen in _fill(members, pairs, shared, limit):
            alone = len(chosen) == 1
            rows.append(
                _alone(chosen[0], pairs[chosen[0]]) if alone else _together(chosen, pairs, shared)
            )
    return rows


def _alone(index: int, pair: Encoded) -> Row:
    size = len(pair.ids) - 1
    predictors = np.arange(pair.start - 1, size)
    return Row(pair.ids[:-1], np.arange(size), np.zeros(size, np.int64), (index,), (predictors,))


def _common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """Tokens with which all sequences begin."""
    size = min(map(len, sequences))
    table = np.stack([sequence[:size] for sequence in sequences])
    different = (table != table[0]).any(axis=0)
    return int(different.argmax()) if different.any() else size


def _fill(
    members: Sequence[int], pairs: Sequence[Encoded], shared: int, limit: int
) -> Iterator[list[int]]:
    """Members in their order, as many to a row as fit."""
    row: list[int] = []
    size = shared
    for index in members:
        more = len(pairs[index].ids) - 1 - shared
        if row and size + more > limit:
            yield row
            row, size = [], shared
        row.append(index)
        size += more
    yield row


def _together(members: Sequence[int], pairs: Sequence[Encoded], shared: int) -> Row:
    ids, positions = [pairs[members[0]].ids[:shared]], [np.arange(shared)]
    branch = [np.zeros(shared, np.int64)]
    predictors, size = [], shared
    for number, index in enumerate(members, start=1):
        pair = pairs[index]
        alone = np.arange(pair.start - 1, len(pair.ids) - 1)
        predictors.append(np.where(alone < shared, alone, alone - shared + size))
        ids.append(pair.ids[shared:-1])
        positions.append(np.arange(shared, len(pair.ids) - 1))
        branch.append(np.full(len(ids[-1]), number))
        size += len(ids[-1])
    return Row(
        np.concatenate(ids),
        np.concatenate(positions),
        np.concatenate(branch),
        tuple(members),
        tuple(predictors),
    )


def batches(rows: Sequence[Row], token_budget: int) -> Iterator[list[Row]]:
    """Rows of similar length together, longest first; padded size within the budget.

    A row longer than the budget is a batch of its own.
    """
    order = sorted(rows, key=len, reverse=True)
    start = 0
    while start < len(order):
        size = max(1, token_budget // len(order[start]))
        yield order[start : start + size]
        start += size
