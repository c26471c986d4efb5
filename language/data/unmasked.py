"""Batches as published code sees them that forgets its mask: every position counts."""

from __future__ import annotations

import torch
from torch import nn

from stable_forgetting.common.data.batch import Batch


def everywhere(batch: Batch, pad: int, length: int | None = None) -> Batch:
    """The batch with all L positions of every row counted, question and padding too.

    Labels are the next token, 0 at the last position.

    Args:
        batch: Of :func:`language.data.source.collate`.
        pad: The padding token.
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
