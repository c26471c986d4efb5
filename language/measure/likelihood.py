"""One teacher-forced pass over every (prompt, answer), from which all likelihood metrics follow.

Probability, truth ratio, extraction strength, exact memorisation and min-k differ only in what they
do with the log-probability of each answer token, so the model runs once: all sets together in
batches of equal length, what several answers to a question begin with only once, and the head only
where a label is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.measure.scores import COLUMNS, scores_without_entropies
from stable_forgetting.language.data.corpus import Encoded
from stable_forgetting.language.measure.guesses import FORWARD
from stable_forgetting.language.measure.requests import AnswerScores
from stable_forgetting.language.models.backbone import (
    CHUNK_ELEMENTS,
    Backbone,
    backbone,
    device_of,
    row_limit,
    unwrapped,
)


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch: the tree of the sequences of one or several pairs.

    Attributes:
        ids: (T,) int64 tokens, each before all that continue it.
        positions: (T,) int64, of each token in its own sequence.
        ends: (T,) int64: where in the row the last token that continues this one has been passed.
        pairs: Which pairs are in here.
        predictors: For each pair, where in the row its labels are predicted, int64.
    """

    ids: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    pairs: tuple[int, ...]
    predictors: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def packed(self) -> bool:
        """Whether it has branches, and so needs a mask of its own."""
        return bool((self.ends < len(self)).any())


def plain_rows(pairs: Sequence[Encoded]) -> list[Row]:
    """One row per pair."""
    return [_row([index], pairs) for index in range(len(pairs))]


def packed_rows(pairs: Sequence[Encoded], limit: int) -> list[Row]:
    """Pairs with one prompt share rows of at most ``limit`` tokens; what does not fit is alone.

    What sequences begin with stands once, and they branch where they differ.  A token sees those
    that it continues, and has the position that it would have alone, so the model computes what it
    would for every pair by itself.  The last token of a sequence is never fed.
    """
    questions: dict[bytes | int, list[int]] = {}
    for index, pair in enumerate(pairs):
        prompt = pair.ids[: pair.start - 1]
        questions.setdefault(prompt.tobytes() if len(prompt) else index, []).append(index)
    filled = (_fill(members, pairs, limit) for members in questions.values())
    return [_row(chosen, pairs) for rows in filled for chosen in rows]


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens with which both sequences begin."""
    size = min(len(one), len(other))
    different = one[:size] != other[:size]
    return int(different.argmax()) if different.any() else size


def _fill(members: Sequence[int], pairs: Sequence[Encoded], limit: int) -> Iterator[list[int]]:
    """Members side by side that begin alike, as many to a row as fit."""
    row: list[int] = []
    size, last = 0, np.empty(0, np.int64)
    for index in sorted(members, key=lambda index: pairs[index].ids[:-1].tobytes()):
        ids = pairs[index].ids[:-1]
        more = len(ids) - _common_prefix(ids, last)
        if row and size + more > limit:
            yield row
            row, size, more = [], 0, len(ids)
        row.append(index)
        size, last = size + more, ids
    yield row


def _row(members: Sequence[int], pairs: Sequence[Encoded]) -> Row:
    """The tree of sequences of which those that begin alike stand side by side."""
    last, path = np.empty(0, np.int64), np.empty(0, np.int64)
    tokens, positions, left, predictors, size = [], [], [], [], 0
    for index in members:
        ids = pairs[index].ids[:-1]
        shared = _common_prefix(ids, last)
        left.append((path[shared:], size))
        path = np.concatenate([path[:shared], np.arange(size, size + len(ids) - shared)])
        tokens.append(ids[shared:])
        positions.append(np.arange(shared, len(ids)))
        predictors.append(path[pairs[index].start - 1 :])
        size, last = size + len(ids) - shared, ids
    ends = np.full(size, size)
    for slots, end in left:
        ends[slots] = end
    together = np.concatenate(tokens), np.concatenate(positions), ends
    return Row(*together, tuple(members), tuple(predictors))


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
    masked_id: int | None = None,
) -> AnswerScores:
    """Scores every pair once; the model is put into eval mode.

    Args:
        model: A causal language model (``model(input_ids, attention_mask).logits``).
        pairs: Prompts with answers; those with the same prompt share it where the model can.
        token_budget: Token slots (padding included) per forward.
        share_prompts: Pack the answers of one prompt into rows with a mask of their own, with what
            they begin with once.
        detailed: (P,) bool: pairs whose ``means`` are wanted; None means all.
        masked_id: A token that nothing but itself attends to, as where a code base derives the
            attention mask from the padding token's id.

    Raises:
        Diverged: A scored logit is NaN or infinite.
    """
    model.eval()
    scorer = _Scorer(model, pairs, detailed, masked_id)
    exact = row_limit(model) if share_prompts else None
    rows, beyond = plain_rows(pairs), list[Row]()
    if exact is not None:  # attention within longer rows costs more than prompts that repeat
        config: Any = unwrapped(model).config
        rows = packed_rows(pairs, min(exact, max(SHORT_ROW, 2 * config.hidden_size)))
        beyond = [row for row in rows if len(row) > exact]  # under the model's own mask
        rows = [row for row in rows if len(row) <= exact]
    with torch.inference_mode():
        for chosen in (*batches(rows, token_budget), *batches(beyond, token_budget)):
            scorer.score(chosen)
    return scorer.result()


class _Scorer:
    """Fills the arrays of an :class:`AnswerScores`, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Sequence[Encoded],
        detailed: np.ndarray | None,
        masked_id: int | None,
    ):
        self.model, self.pairs, self.masked_id = model, pairs, masked_id
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
            states = self.parts.decoder(**inputs, use_cache=False).last_hidden_state
        at = (self._tensor(numbers), self._tensor(places))
        return states[tuple(index.to(states.device) for index in at)]

    def _columns(
        self, states: Tensor, chosen: np.ndarray, labels: np.ndarray, detail: bool
    ) -> np.ndarray:
        """(M, len(COLUMNS)): all columns but entropies, or loss and hits alone; NaN elsewhere."""
        head: Any = self.parts.head if self.parts is not None else nn.Identity()
        where, targets = (self._tensor(array).to(states.device) for array in (chosen, labels))
        width = getattr(head, "out_features", states.shape[-1])
        rows = max(1, CHUNK_ELEMENTS // width)
        score = scores_without_entropies if detail else _loss_and_hits
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
        ends = self._padded([row.ends for row in rows], 0)
        return {
            "input_ids": ids,
            "attention_mask": _tree_mask(ends, seen.bool(), self.dtype),
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


def _tree_mask(ends: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 1, T, T) additive: each token sees itself and those that it continues.

    Padding sees itself, so that no row of the softmax is empty.
    """
    size = ends.shape[1]
    place = torch.arange(size, device=ends.device)
    allowed = (place[:, None] >= place) & (ends[:, None, :] > place[:, None]) & seen[:, None, :]
    allowed |= torch.eye(size, dtype=torch.bool, device=ends.device)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=ends.device)
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
