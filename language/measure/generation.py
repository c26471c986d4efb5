"""Greedy answers: prompts of similar length together, and a row leaves when it is finished.

The batch shrinks with every finished row (the cache drops it too), so a forward costs what its
unfinished rows cost; nobody waits for the slowest row of a batch.  What a teacher-forced pass has
shown to be the beginning of an answer is not written again: decoding starts behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.language.models.backbone import (
    backbone,
    cache_input,
    cache_output,
    device_of,
    unwrapped,
)


@dataclass(frozen=True)
class Ends:
    """What ends a text.

    Attributes:
        tokens: Token ids.
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

    def within(self, draft: Sequence[int], limit: int) -> tuple[list[int], bool]:
        """What of a draft belongs to the text, and whether the text ends there."""
        written: list[int] = []
        for token in draft:
            if token in self.tokens or len(written) >= limit:
                return written, True
            written.append(token)
            if self.reached(written):
                return written, True
        return written, len(written) >= limit


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
        token_budget: Token slots (padding included) of the first forward of a batch.
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
    begun = map(ends.within, drafts or [()] * len(prompts), limits.tolist())
    written, over = map(list, zip(*begun, strict=True)) if len(prompts) else ([], [])
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
            _write(unwrapped(model), starts, shown, rows, ends, limits, written)
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
) -> None:
    """Writes one batch to its end."""
    tokens, seen = (
        _left_padded([table[row] for row in rows], device_of(model)) for table in (prompts, shown)
    )
    positions = (seen.cumsum(dim=1) - 1).clamp_min(0)
    cache: Any = None
    while rows:
        logits, cache = _last_logits(model, tokens, seen, positions, cache)
        newest = logits.float().argmax(dim=1).to(seen.device)
        open_rows = []
        for place, (row, token) in enumerate(zip(rows, newest.tolist(), strict=True)):
            if token not in ends.tokens:
                written[row].append(token)
                if len(written[row]) < limits[row] and not ends.reached(written[row]):
                    open_rows.append(place)
        if len(open_rows) < len(rows):
            rows = [rows[place] for place in open_rows]
            places = torch.as_tensor(open_rows, dtype=torch.int64, device=seen.device)
            newest, seen, positions = newest[places], seen[places], positions[places]
            if rows:
                cache.batch_select_indices(places)
        tokens, positions = newest[:, None], positions[:, -1:] + 1
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)


def _left_padded(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    width = max(map(len, arrays))
    table = np.zeros((len(arrays), width), dtype=np.int64)
    for row, array in zip(table, arrays, strict=True):
        row[width - len(array) :] = array
    return torch.from_numpy(table).to(device)


def _last_logits(
    model: Any, tokens: Tensor, seen: Tensor, positions: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    """(N, V) logits after the last token, and the cache with the tokens in it."""
    inputs = {
        "input_ids": tokens,
        "attention_mask": seen,
        "position_ids": positions,
        "use_cache": True,
    }
    parts = backbone(model)
    if parts is None:
        out = model(**inputs, **cache_input(model, cache))
        return out.logits[:, -1], cache_output(out)
    out = parts.decoder(**inputs, **cache_input(parts.decoder, cache))
    return parts.head(out.last_hidden_state[:, -1]), cache_output(out)
