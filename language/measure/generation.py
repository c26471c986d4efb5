"""Greedy answers: prompts of similar length together, and a row leaves when it is finished.

The batch shrinks with every finished row (the cache drops it too), so a forward costs what its
unfinished rows cost; nobody waits for the slowest row of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from language.models.backbone import backbone, device_of, unwrapped


def generate(
    model: nn.Module,
    prompts: Sequence[np.ndarray],
    *,
    stop: Collection[int],
    max_new_tokens: int | Sequence[int],
    batch_size: int = 128,
    token_budget: int = 8192,
) -> list[np.ndarray]:
    """Greedy continuations, each what the model would say to its prompt alone.

    Args:
        model: A causal language model with a key-value cache; put into eval mode.
        prompts: Int64 token ids, each of length 1 or more.
        stop: Tokens that end an answer.
        max_new_tokens: For all prompts, or one limit per prompt.
        batch_size: Rows per batch.
        token_budget: Token slots (padding included) of the first forward of a batch.

    Returns:
        New tokens per prompt, int64, without the one that ended it.
    """
    limits = np.broadcast_to(np.asarray(max_new_tokens, dtype=np.int64), (len(prompts),))
    written: list[list[int]] = [[] for _ in prompts]
    model.eval()
    with torch.inference_mode():
        for chosen in _batches(prompts, limits, batch_size, token_budget):
            _write(unwrapped(model), prompts, chosen, frozenset(stop), limits, written)
    return [np.asarray(tokens, dtype=np.int64) for tokens in written]


def _batches(
    prompts: Sequence[np.ndarray], limits: np.ndarray, batch_size: int, token_budget: int
) -> Iterator[list[int]]:
    """Indices of prompts that may say something, longest prompts first."""
    order = sorted(np.flatnonzero(limits > 0).tolist(), key=lambda k: len(prompts[k]), reverse=True)
    start = 0
    while start < len(order):
        size = max(1, min(batch_size, token_budget // len(prompts[order[start]])))
        yield order[start : start + size]
        start += size


def _write(
    model: nn.Module,
    prompts: Sequence[np.ndarray],
    rows: list[int],
    stop: frozenset[int],
    limits: np.ndarray,
    written: list[list[int]],
) -> None:
    """Writes one batch to its end."""
    tokens, seen = _left_padded([prompts[row] for row in rows], device_of(model))
    positions = (seen.cumsum(dim=1) - 1).clamp_min(0)
    cache: Any = None
    while rows:
        logits, cache = _last_logits(model, tokens, seen, positions, cache)
        said = logits.float().argmax(dim=1).to(seen.device)
        kept = []
        for place, (row, token) in enumerate(zip(rows, said.tolist(), strict=True)):
            if token not in stop:
                written[row].append(token)
                if len(written[row]) < limits[row]:
                    kept.append(place)
        if len(kept) < len(rows):
            rows = [rows[place] for place in kept]
            places = torch.as_tensor(kept, dtype=torch.int64, device=seen.device)
            said, seen, positions = said[places], seen[places], positions[places]
            if rows:
                cache.batch_select_indices(places)
        tokens, positions = said[:, None], positions[:, -1:] + 1
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)


def _left_padded(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    tokens = np.zeros((len(prompts), width), dtype=np.int64)
    seen = np.zeros_like(tokens)
    for row, mask, prompt in zip(tokens, seen, prompts, strict=True):
        row[width - len(prompt) :], mask[width - len(prompt) :] = prompt, 1
    return torch.from_numpy(tokens).to(device), torch.from_numpy(seen).to(device)


def _last_logits(
    model: Any, tokens: Tensor, seen: Tensor, positions: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    """(N, V) logits after the last token, and the cache with the tokens in it."""
    inputs = {
        "input_ids": tokens,
        "attention_mask": seen,
        "position_ids": positions,
        "past_key_values": cache,
        "use_cache": True,
    }
    parts = backbone(model)
    if parts is None:
        out = model(**inputs)
        return out.logits[:, -1], out.past_key_values
    out = parts.decoder(**inputs)
    return parts.head(out.last_hidden_state[:, -1]), out.past_key_values
