"""Greedy answers: prompts of similar length together, and a row leaves when it is finished.

The batch shrinks with every finished row (the cache drops it too), so a forward costs what its
unfinished rows cost; nobody waits for the slowest row of a batch.  What a teacher-forced pass has
shown to be the beginning of an answer is not written again: decoding starts behind it.  Where a
text repeats itself, one forward checks many tokens (:mod:`language.measure.guesses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from stable_forgetting.language.measure.guesses import Text, met, worth
from stable_forgetting.language.models.backbone import (
    CHUNK_ELEMENTS,
    backbone,
    cache_input,
    cache_output,
    device_of,
    give_room,
    row_limit,
    unwrapped,
)


@dataclass(frozen=True)
class Ends:
    """What ends a text.

    Attributes:
        texts: Strings, looked for in the newest tokens that can hold one of them.
        decode: Token ids -> text.
    """

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def reached(self, written: Sequence[int]) -> bool:
        """Whether the newest token completes one of the strings.

        A token is a byte or more, so a string of b bytes ends within b tokens; four more hold the
        rest of a character that the first of them may belong to.
        """
        if not self.texts or self.decode is None:
            return False
        window = 4 + max(len(text.encode()) for text in self.texts)
        newest = self.decode(written[-window:])
        return any(text in newest for text in self.texts)

    def reached_by(self, written: list[int], more: Iterable[int], limit: int) -> bool:
        """Adds to a text what of ``more`` belongs to it; whether the text ends there."""
        for token in more:
            if token in self.tokens or len(written) >= limit:
                return True
            written.append(token)
            if self.reached(written):
                return True
        return len(written) >= limit


def generate(
    model: nn.Module,
    prompts: Sequence[np.ndarray],
    *,
    stop: Collection[int],
    max_new_tokens: int | Sequence[int],
    stop_text: Sequence[str] = (),
    decode: Callable[[Sequence[int]], str] | None = None,
    batch_size: int = 128,
    token_budget: int = 8192,
    drafts: Sequence[Sequence[int]] | None = None,
    masked_id: int | None = None,
) -> list[np.ndarray]:
    """Greedy continuations, each what the model would say to its prompt alone.

    Args:
        model: A causal language model with a key-value cache; put into eval mode.
        prompts: Int64 token ids, each of length 1 or more.
        stop: Tokens that end an answer.
        max_new_tokens: For all prompts, or one limit per prompt.
        stop_text: Strings that end an answer.
        decode: Token ids -> text; needed for ``stop_text``.
        batch_size: Rows per batch.
        token_budget: Token slots (padding included) of a forward.
        drafts: Per prompt the tokens with which its greedy continuation begins, as far as they are
            known (:func:`language.measure.ask.drafts`); they may go beyond its end.
        masked_id: A token of prompts that nothing attends to and that takes no position, as where
            a code base derives attention and positions from the padding token's id.

    Returns:
        New tokens per prompt, int64, without the one of ``stop`` that ended it, and with the one
        that completed a string of ``stop_text``: its text may begin before the string.
    """
    assert decode is not None or not stop_text, "stop_text needs decode"
    limits = np.broadcast_to(np.asarray(max_new_tokens, dtype=np.int64), (len(prompts),))
    ends = Ends(frozenset(stop), tuple(stop_text), decode)
    written: list[list[int]] = [[] for _ in prompts]
    begun = zip(written, drafts or [()] * len(prompts), limits.tolist(), strict=True)
    over = [ends.reached_by(*each) for each in begun]
    lengths = np.asarray([len(tokens) for tokens in written], dtype=np.int64)
    remaining = np.where(over, 0, limits - lengths) if len(prompts) else limits
    starts = [np.r_[prompt, tokens] for prompt, tokens in zip(prompts, written, strict=True)]
    shown = [np.ones_like(start) for start in starts]
    for mask, prompt in zip(shown, prompts, strict=True):
        mask[: len(prompt)] = True if masked_id is None else prompt != masked_id
    model.eval()
    with torch.inference_mode():
        room = getattr(unwrapped(model).config, "max_position_embeddings", None)
        for rows in _batches(starts, remaining, batch_size, token_budget, room or math.inf):
            _write(unwrapped(model), starts, shown, rows, ends, limits, written, token_budget)
    return [np.asarray(tokens, dtype=np.int64) for tokens in written]


def _batches(
    prompts: Sequence[np.ndarray],
    limits: np.ndarray,
    batch_size: int,
    token_budget: int,
    room: float,
) -> Iterator[list[int]]:
    """Indices of prompts that may say something, longest prompts first.

    Shorter prompts are padded to the longest: no padded row grows beyond ``room`` tokens, where
    its prompt alone would not.
    """
    order = sorted(np.flatnonzero(limits > 0).tolist(), key=lambda k: len(prompts[k]), reverse=True)
    start = 0
    while start < len(order):
        longest = len(prompts[order[start]])
        size = max(1, min(batch_size, token_budget // longest))
        rows = order[start : start + size]
        wide = [place for place, row in enumerate(rows) if longest + limits[row] > room]
        rows = rows[: max(1, wide[0])] if wide else rows
        yield rows
        start += len(rows)


def _write(
    model: nn.Module,
    prompts: Sequence[np.ndarray],
    shown: Sequence[np.ndarray],
    rows: list[int],
    ends: Ends,
    limits: np.ndarray,
    written: list[list[int]],
    token_budget: int,
) -> None:
    """Writes one batch to its end.

    A forward takes the newest token of each row and a guess of what follows it.  The tokens of a
    wrong guess stay in the cache, hidden by the mask: beyond a forward's slots it has at most
    twice the places that the longest text needs.  A model without a key-value cache (one with
    recurrent states) reads every text whole again, and alone, as padding would enter its state.
    """
    tokens, seen = (_padded([table[row] for row in rows], left=True) for table in (prompts, shown))
    positions = (seen.cumsum(axis=1) - 1).clip(0)
    texts = {row: Text(prompts[row].tolist()) for row in rows}
    guesses: list[list[int]] = [[] for _ in rows]
    cache: Any = None
    longest = tokens.shape[1] + int(limits[rows].max())
    while True:
        width = 1 if cache is None else tokens.shape[1]
        said, cache = _greedy(model, (tokens, seen, positions), width, cache)
        if cache is None and len(rows) > 1:
            for row in rows:
                _write(model, prompts, shown, [row], ends, limits, written, token_budget)
            return
        kept, open_rows = np.ones(len(rows), dtype=np.int64), []
        for place, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
            before = len(written[row])
            if not ends.reached_by(written[row], met(said[place].tolist(), guess), limits[row]):
                texts[row].add(written[row][before:])
                kept[place] = len(written[row]) - before
                open_rows.append(place)
        if not open_rows:
            return
        seen[:, -width:] &= np.arange(width) < kept[:, None]
        newest = positions[:, -width] + kept
        if len(open_rows) < len(rows):
            rows, seen, newest = [rows[k] for k in open_rows], seen[open_rows], newest[open_rows]
            cache.batch_select_indices(torch.as_tensor(open_rows, device=device_of(model)))
        left = limits[rows] - [len(written[row]) for row in rows]
        places = min(row_limit(model) or 0, max(2 * longest, token_budget // len(rows)))
        room = places - seen.shape[1] - int(left.max())
        guesses = [
            texts[row].guess(most - 1) for row, most in zip(rows, left.tolist(), strict=True)
        ]
        guesses = worth(guesses, min(room, token_budget // len(rows)))
        fed = [np.r_[written[row][-1], guess] for row, guess in zip(rows, guesses, strict=True)]
        added = _padded(fed).astype(np.int64)
        steps = np.arange(added.shape[1])
        at = newest[:, None] + np.minimum(steps, [[len(guess)] for guess in guesses])
        seen = np.c_[seen, np.ones_like(added)]
        if cache is None:
            added, at = np.c_[tokens, added], np.c_[positions, at]
        tokens, positions = added, at


def _padded(arrays: Sequence[np.ndarray], *, left: bool = False) -> np.ndarray:
    width = max(map(len, arrays))
    table = np.zeros((len(arrays), width), dtype=np.int64)
    for row, array in zip(table, arrays, strict=True):
        row[width - len(array) if left else 0 :][: len(array)] = array
    return table


def _greedy(
    model: Any, inputs: tuple[np.ndarray, ...], width: int, cache: Any
) -> tuple[np.ndarray, Any]:
    """(N, width) likeliest tokens after each of the last ones, and a cache with room for more."""
    names, device = ("input_ids", "attention_mask", "position_ids"), device_of(model)
    given: dict[str, Any] = {"use_cache": True}
    for name, table in zip(names, inputs, strict=True):
        given[name] = torch.from_numpy(table).to(device)
    parts = backbone(model)
    decoder: Any = model if parts is None else parts.decoder
    out = decoder(**given, **cache_input(decoder, cache))
    newest = cache_output(out)
    if cache is None:
        give_room(newest)
    if parts is None:
        return out.logits[:, -width:].argmax(dim=2).cpu().numpy(), newest
    head: Any = parts.head
    states = out.last_hidden_state[:, -width:].flatten(0, 1)
    chunks = states.split(max(1, CHUNK_ELEMENTS // head.out_features))
    said = torch.cat([head(chunk).argmax(dim=1) for chunk in chunks])
    return said.view(-1, width).cpu().numpy(), newest
