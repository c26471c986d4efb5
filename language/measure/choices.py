"""Multiple choice: whether the likeliest of several given ends of a text is the right one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.measure.requests import Choose, Columns, Replies, TextMetric


class Chosen(TextMetric):
    """Whether the likeliest choice is the right one: ``chosen``, 0 or 1.

    Args:
        window: Tokens that the model sees; a longer question loses its beginning.
    """

    def __init__(self, window: int):
        self.window = window

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Choose]:
        """The choices after the question."""
        encoder, made = source.encoder, []
        for item in items:
            options = tuple(tuple(encoder.continuation(f" {each}")) for each in item.perturbed)
            room = self.window - max(map(len, options))
            made.append(Choose(tuple(encoder.ending(encoder.text(item.question), room)), options))
        return made

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """(N,)."""
        likely = replies.choices(self.requests(source, items))
        hits = [values.argmax() == item.group for values, item in zip(likely, items, strict=True)]
        return {"chosen": np.array(hits, dtype=float)}
