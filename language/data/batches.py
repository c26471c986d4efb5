"""Token ids as batches: padded right, with whatever published code counts beside the labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.common.data.batch import IGNORE, Batch, to_device
from stable_forgetting.language.data.corpus import Encoded


def collate(
    pairs: Sequence[Encoded],
    indices: Tensor,
    *,
    device: torch.device | str = "cpu",
    hidden_id: int | None = None,
) -> Batch:
    """Right-padded batch of N pairs; L is the longest sequence, A the most labels.

    Args:
        pairs: Token ids.
        indices: (N,) int64, where the pairs sit in their source.
        hidden_id: Leave this token out of the attention mask (``TextSource.hidden_id``).

    Returns:
        Inputs ``input_ids`` (N, L) padded with 0, ``attention_mask`` (N, L) and ``positions``
        (N, A): where the hidden state that predicts each label sits, 0 where padded.  Labels
        (N, A), -100 where padded.  All int64.
    """
    length = max(len(pair.ids) for pair in pairs)
    width = max(len(pair.ids) - pair.start for pair in pairs)
    ids, mask = (np.zeros((len(pairs), length), dtype=np.int64) for _ in range(2))
    positions = np.zeros((len(pairs), width), dtype=np.int64)
    labels = np.full((len(pairs), width), IGNORE, dtype=np.int64)
    for row, pair in enumerate(pairs):
        total, count = len(pair.ids), len(pair.ids) - pair.start
        ids[row, :total] = pair.ids
        mask[row, :total] = 1 if hidden_id is None else pair.ids != hidden_id
        positions[row, :count] = np.arange(pair.start - 1, total - 1)
        labels[row, :count] = pair.labels
    inputs = {"input_ids": ids, "attention_mask": mask, "positions": positions}
    moved = {n: to_device(torch.from_numpy(a), device) for n, a in {**inputs, "": labels}.items()}
    return Batch({n: moved[n] for n in inputs}, moved[""], indices)


def everywhere(batch: Batch, pad: int, length: int | None = None) -> Batch:
    """The batch with all L positions of every row counted, question and padding too.

    Labels are the next token, 0 at the last position.

    Args:
        length: L, at least; nothing attends to a text's end token then, which is padding too where
            texts are padded with it (TOFU's code).  0: as long as the batch, and the end token is
            a token.  None: as long as the batch, padded with token 0.
    """
    if length is not None:
        batch = _padded(batch, pad, length)
    ids = batch.inputs["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    labels = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    return Batch({**batch.inputs, "positions": positions}, labels, batch.indices)


def _padded(batch: Batch, pad: int, length: int) -> Batch:
    ids, seen = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    more = (0, max(0, length - ids.shape[1]))
    ids, seen = nn.functional.pad(ids, more), nn.functional.pad(seen, more)
    last = batch.inputs["positions"].max(1, keepdim=True).values + 1  # of the text's tokens
    inside = torch.arange(ids.shape[1], device=ids.device) <= last
    ids = ids.masked_fill(~inside, pad)
    if length:
        seen = seen.scatter(1, last, seen.gather(1, last) * (ids.gather(1, last) != pad))
    inputs = {**batch.inputs, "input_ids": ids, "attention_mask": seen}
    return Batch(inputs, batch.labels, batch.indices)


def renamed(batch: Batch, vocabulary: int, seed: int) -> Batch:
    """The batch with every token under another name: one permutation of the vocabulary."""
    ids, labels = batch.inputs["input_ids"], batch.labels
    stream = torch.Generator().manual_seed(seed)
    order = torch.randperm(vocabulary, generator=stream).to(ids.device)
    moved = torch.where(labels == IGNORE, IGNORE, order[labels.clamp_min(0)])
    return Batch({**batch.inputs, "input_ids": order[ids]}, moved, batch.indices)
