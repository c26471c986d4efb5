"""Extraction likelihood and memorisation accuracy as questions to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.measure.requests import Continue, Likelihood, Replies, TextMetric
from stable_forgetting.language.metrics.extraction import (
    assembled,
    decode_steps,
    extraction_likelihood,
    filled,
    rollouts,
)

if TYPE_CHECKING:
    from stable_forgetting.language.data.source import TextSource

PadPolicy = Literal["trim", "source"]


class Memorisation(TextMetric):
    """Memorisation accuracy: column ``ma``, a share.

    Args:
        pad: ``trim`` scores a text's own tokens; ``source`` fills short texts with end tokens up
            to the length limit and scores those too, as the published code does.
    """

    def __init__(self, pad: PadPolicy = "trim"):
        self.pad = pad

    def ids(self, source: TextSource, item: Item) -> tuple[int, ...]:
        """The tokens that are scored."""
        ids = source.encode(item.question, item.answer).ids.tolist()
        length = source.encoder.max_length if self.pad == "source" else len(ids)
        return tuple(filled(ids, length, source.encoder.end))

    def requests(self, source: TextSource, items: Sequence[Item]) -> Iterable[Likelihood]:
        """One teacher-forced pass over every text."""
        return [Likelihood(self.ids(source, item), 1) for item in items]

    def hits(self, source: TextSource, items: Sequence[Item], replies: Replies) -> list[np.ndarray]:
        """(T-1,) bool per text: whether the argmax is the next token."""
        scores = replies.scores(list(self.requests(source, items)))
        return np.split(scores.hits, np.cumsum(scores.counts)[:-1])

    def columns(
        self, source: TextSource, items: Sequence[Item], replies: Replies
    ) -> Mapping[str, np.ndarray]:
        """(N,)."""
        return {"ma": np.array([row.mean() for row in self.hits(source, items, replies)])}


class Extraction(Memorisation):
    """The same, and extraction likelihood: columns ``el`` (a share) and, in tokens that the model
    wrote, ``el_steps`` and what the definition would have written, ``el_naive_steps``.

    Args:
        n: Tokens of an n-gram.
        pad: See :class:`Memorisation`.
        naive: Let the model write after every prefix, by the definition, instead of only after
            those whose next token it gets wrong.  The values are the same.
    """

    generates = True

    def __init__(self, n: int, pad: PadPolicy = "trim", *, naive: bool = False):
        super().__init__(pad)
        self.n, self.naive = n, naive

    def follow_up(
        self, source: TextSource, items: Sequence[Item], replies: Replies
    ) -> list[Continue]:
        """Continuations of prefixes."""
        asked = self._asked(source, items, replies)
        return [request for row in asked for request in row.values()]

    def _asked(
        self, source: TextSource, items: Sequence[Item], replies: Replies
    ) -> list[dict[int, Continue]]:
        """Prefix length -> request, per text."""
        end = source.encoder.end
        asked = []
        for item, hits in zip(items, self.hits(source, items, replies), strict=True):
            ids = self.ids(source, item)
            some = rollouts(ids, hits, self.n, end=end)
            lengths = range(1, len(ids) - self.n + 1) if self.naive else some
            stop = frozenset({end})
            asked.append({i: Continue(ids[:i], len(ids) - i, stop) for i in lengths})
        return asked

    def columns(
        self, source: TextSource, items: Sequence[Item], replies: Replies
    ) -> Mapping[str, np.ndarray]:
        """(N,) each."""
        rows = []
        all_hits = self.hits(source, items, replies)
        for item, hits, asked in zip(
            items, all_hits, self._asked(source, items, replies), strict=True
        ):
            texts = [text.tolist() for text in replies.tokens(list(asked.values()))]
            rows.append(self._row(source, item, hits, dict(zip(asked, texts, strict=True))))
        names = ("el", "el_steps", "el_naive_steps")
        table = dict(zip(names, np.array(rows, dtype=np.float64).reshape(-1, 3).T, strict=True))
        return {**super().columns(source, items, replies), **table}

    def _row(
        self, source: TextSource, item: Item, hits: np.ndarray, written: dict[int, list[int]]
    ) -> tuple[float, int, int]:
        ids, end = self.ids(source, item), source.encoder.end
        total = len(ids)
        every = written if self.naive else assembled(ids, hits, written, end=end)
        needed = {i: every[i] for i in range(1, total - self.n + 1)}
        whole = {i: filled(text, total - i, end) for i, text in needed.items()}
        steps = decode_steps({i: len(text) for i, text in written.items()}, total)
        naive = decode_steps({i: len(text) for i, text in needed.items()}, total)
        return extraction_likelihood(ids, whole, self.n), steps, naive
