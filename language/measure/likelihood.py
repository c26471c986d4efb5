"""One teacher-forced pass over every (prompt, answer), from which all likelihood metrics follow.

Probability, truth ratio, extraction strength, exact memorisation and min-k differ only in what they
do with the log-probability of each answer token, so the model runs once: all sets together in
batches of equal length, a question's answers behind one copy of its prompt, and the head only where
a label is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.measure.scores import COLUMNS, score_rows
from stable_forgetting.language.data.corpus import Encoded
from stable_forgetting.language.measure.guesses import FORWARD
from stable_forgetting.language.measure.requests import AnswerScores
from stable_forgetting.language.models.backbone import (
    CHUNK_ELEMENTS,
    Backbone,
    backbone,
    device_of,
    hidden_states,
    row_limit,
    unwrapped,
)


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
    """Pairs with one prompt share rows of at most ``limit`` tokens; what does not fit is alone.

    The prompt stands once, and each answer is a branch behind it: a token of a branch sees the
    prompt and its own branch, and has the position that it would have alone, so the model computes
    what it would for every pair by itself.  The last token of a sequence is never fed.
    """
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

    A batch ends where its padding would cost as much as another forward.  A row longer than the
    budget is a batch of its own.
    """
    order = sorted(rows, key=len, reverse=True)
    lengths = np.asarray([len(row) for row in order])
    start = 0
    while start < len(order):
        longest = lengths[start]
        size = max(1, token_budget // longest)
        padding = np.cumsum(longest - lengths[start : start + size])
        size = int((padding <= FORWARD).sum())
        yield order[start : start + size]
        start += size


SHORT_ROW = 256
"""Tokens of a packed row that a model of any width takes."""


def teacher_forced(
    model: nn.Module,
    pairs: Sequence[Encoded],
    *,
    token_budget: int = 8192,
    share_prompts: bool = True,
    detailed: np.ndarray | None = None,
    entropies: bool = True,
    masked_id: int | None = None,
) -> AnswerScores:
    """Scores every pair once; the model is put into eval mode.

    Args:
        model: A causal language model (``model(input_ids, attention_mask).logits``).
        pairs: Prompts with answers; those with the same prompt share it where the model can.
        token_budget: Token slots (padding included) per forward.
        share_prompts: Pack the answers of one prompt into rows with a mask of their own.
        detailed: (P,) bool: pairs whose ``means`` are wanted; None means all.
        entropies: Whether those have entropies, which cost most of the time; NaN if not.
        masked_id: A token that nothing but itself attends to, as where a code base derives the
            attention mask from the padding token's id.

    Raises:
        Diverged: A scored logit is NaN or infinite.
    """
    model.eval()
    scorer = _Scorer(model, pairs, detailed, entropies, masked_id)
    limit = row_limit(model) if share_prompts else None
    if limit is not None:  # attention within longer rows costs more than prompts that repeat
        config: Any = unwrapped(model).config
        limit = min(limit, max(SHORT_ROW, 2 * config.hidden_size))
    rows = plain_rows(pairs) if limit is None else packed_rows(pairs, limit)
    with torch.inference_mode():
        for chosen in batches(rows, token_budget):
            scorer.score(chosen)
    return scorer.result()


class _Scorer:
    """Fills the arrays of an :class:`AnswerScores`, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Sequence[Encoded],
        detailed: np.ndarray | None,
        entropies: bool,
        masked_id: int | None,
    ):
        self.model, self.pairs, self.masked_id = model, pairs, masked_id
        self.rich = partial(score_rows, entropies=entropies)
        self.parts: Backbone | None = backbone(model)
        self.device = device_of(unwrapped(model))
        self.dtype = next(model.parameters()).dtype
        self.detailed = np.ones(len(pairs), dtype=bool) if detailed is None else detailed
        self.counts = np.asarray([len(pair.labels) for pair in pairs], dtype=np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.table = np.full((int(self.counts.sum()), len(COLUMNS)), np.nan)

    def score(self, rows: Sequence[Row]) -> None:
        """One forward, and what it says about each label."""
        inputs = self._inputs(rows)
        pairs = [pair for row in rows for pair in row.pairs]
        starts, counts = self.starts[pairs], self.counts[pairs]
        numbers = np.repeat([n for n, row in enumerate(rows) for _ in row.pairs], counts)
        places = np.concatenate([place for row in rows for place in row.predictors])
        slots = np.concatenate(
            [start + np.arange(n) for start, n in zip(starts, counts, strict=True)]
        )
        labels = np.concatenate([self.pairs[pair].labels for pair in pairs])
        rich = np.repeat(self.detailed[pairs], counts)
        states = self._states(inputs, numbers, places)
        for chosen in (np.flatnonzero(rich), np.flatnonzero(~rich)):
            if len(chosen):
                detail = bool(rich[chosen[0]])
                columns = self._columns(states, chosen, labels[chosen], detail)
                self.table[slots[chosen]] = columns

    def _states(self, inputs: dict[str, Tensor], numbers: np.ndarray, places: np.ndarray) -> Tensor:
        """Hidden states (or logits, without a backbone) at the predicting positions, (M, D)."""
        if self.parts is None:
            states = self.model(**inputs).logits
        else:
            states = hidden_states(self.parts, inputs)
        at = (self._tensor(numbers), self._tensor(places))
        return states[tuple(index.to(states.device) for index in at)]

    def _columns(
        self, states: Tensor, chosen: np.ndarray, labels: np.ndarray, detail: bool
    ) -> np.ndarray:
        """(M, len(COLUMNS)): all columns, or NaN but for loss and hits."""
        head: Any = self.parts.head if self.parts is not None else nn.Identity()
        where, targets = (self._tensor(array).to(states.device) for array in (chosen, labels))
        width = getattr(head, "out_features", states.shape[-1])
        rows = max(1, CHUNK_ELEMENTS // width)
        score = self.rich if detail else _loss_and_hits
        chunks = []
        for index, target in zip(where.split(rows), targets.split(rows), strict=True):
            logits = head(states[index])
            chunks.append(score(logits, target.to(logits.device)))
        return np.concatenate(chunks)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def _inputs(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        ids = self._padded([row.ids for row in rows], 0)
        seen = self._padded([np.ones(len(row), np.int64) for row in rows], 0)
        if self.masked_id is not None:
            seen = seen * (ids != self.masked_id)
        if not any(row.packed for row in rows):
            return {"input_ids": ids, "attention_mask": seen}
        branch = self._padded([row.branch for row in rows], 0)
        return {
            "input_ids": ids,
            "attention_mask": _branch_mask(branch, seen.bool(), self.dtype),
            "position_ids": self._padded([row.positions for row in rows], 0),
        }

    def _padded(self, arrays: Sequence[np.ndarray], value: int) -> Tensor:
        table = np.full((len(arrays), max(map(len, arrays))), value, dtype=np.int64)
        for row, array in zip(table, arrays, strict=True):
            row[: len(array)] = array
        return self._tensor(table)

    def result(self) -> AnswerScores:
        """What was collected."""
        owner = np.repeat(np.arange(len(self.pairs)), self.counts)
        sums = [
            np.bincount(owner, weights=column, minlength=len(self.pairs)) for column in self.table.T
        ]
        return AnswerScores(
            self.counts,
            self.table[:, COLUMNS.index("loss")].copy(),
            self.table[:, COLUMNS.index("correct")] == 1,
            np.stack(sums, axis=1) / self.counts[:, None],
        )


def _branch_mask(branch: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 1, T, T) additive: causal, within the shared part and one's own branch.

    Padding sees itself, so that no row of the softmax is empty.
    """
    size = branch.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=branch.device).tril()
    same = branch[:, :, None] == branch[:, None, :]
    allowed = causal & (same | (branch[:, None, :] == 0)) & seen[:, None, :]
    allowed |= torch.eye(size, dtype=torch.bool, device=branch.device)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=branch.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _loss_and_hits(logits: Tensor, labels: Tensor) -> np.ndarray:
    """The columns that wrong answers need: loss and correctness, the rest NaN."""
    z = logits.float()
    loss = z.logsumexp(dim=1) - z.gather(1, labels[:, None])[:, 0]
    table = np.full((len(labels), len(COLUMNS)), np.nan)
    table[:, COLUMNS.index("loss")] = loss.cpu().numpy()
    table[:, COLUMNS.index("correct")] = (z.argmax(dim=1) == labels).cpu().numpy()
    bad = int((~np.isfinite(table[:, COLUMNS.index("loss")])).sum())
    if bad:
        raise Diverged(0, f"{bad} of {len(labels)} logit rows are not finite")
    return table
