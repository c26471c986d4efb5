"""Extraction likelihood and memorisation accuracy: what a model is asked, and the numbers.

Both are of Jang et al., 2023 (arXiv 2210.01504), for a text x of T tokens and greedy decoding:

    MA(x)   = 1/(T-1) sum_{i=1}^{T-1} [argmax p(. | x_1..x_i) = x_{i+1}]
    EL_n(x) = 1/(T-n) sum_{i=1}^{T-n} OVL_n(g_i, x_{i+1}..x_T)

g_i is the greedy continuation of the first i tokens up to T tokens in all, and OVL_n(a, b) the
share of the n-grams of b's length that a has in common with b: every n-gram of a counts that is
one of b's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.measure.requests import Continue, Likelihood, Replies, TextMetric

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
    """

    def __init__(self, n: int, pad: PadPolicy = "trim"):
        super().__init__(pad)
        self.n = n

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
            lengths, stop = rollouts(ids, hits, self.n, end=end), frozenset({end})
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
        every = assembled(ids, hits, written, end=end)
        needed = {i: every[i] for i in range(1, total - self.n + 1)}
        whole = {i: filled(text, total - i, end) for i, text in needed.items()}
        steps = decode_steps({i: len(text) for i, text in written.items()}, total)
        naive = decode_steps({i: len(text) for i, text in needed.items()}, total)
        return extraction_likelihood(ids, whole, self.n), steps, naive


Tokens = Sequence[int]


def extraction_likelihood(ids: Tokens, written: Mapping[int, Tokens], n: int) -> float:
    """EL_n of one text by its definition.

    Args:
        ids: The text, more than n tokens.
        written: i -> greedy continuation of the first i tokens; all of 1..T-n.  One that ended
            early is shorter than T-i.
        n: Tokens of an n-gram.
    """
    total = len(ids)
    last = {tuple(ids[k : k + n]): k for k in range(total - n + 1)}  # the last place of each
    shares = []
    for i in range(1, total - n + 1):
        own = written[i]
        grams = (tuple(own[k : k + n]) for k in range(len(own) - n + 1))
        hits = sum(last.get(gram, -1) >= i for gram in grams)
        shares.append(hits / (total - i - n + 1))
    return float(np.mean(shares))


def rollouts(ids: Tokens, hits: Tokens | np.ndarray, n: int, *, end: int) -> list[int]:
    """The prefix lengths from which the exact shortcut lets the model write.

    Where the teacher-forced argmax is the text's own next token, the continuation is that token
    and the continuation after it; so only the other prefixes are asked.  Beyond T-n one is asked
    only where a continuation from before leads there.

    Args:
        hits: (T-1,) bool: whether the argmax after i+1 tokens is the text's own.
        n: Tokens of an n-gram.
        end: Token that ends a text.
    """
    total = len(ids)
    asked: list[int] = []
    for i in range(1, total):
        if not hits[i - 1]:
            asked.append(i)
        if i >= total - n and (not hits[i - 1] or ids[i] == end):
            break
    return asked


def assembled(
    ids: Tokens, hits: Tokens | np.ndarray, written: Mapping[int, Tokens], *, end: int
) -> dict[int, Tokens]:
    """Continuations of all prefixes from those of :func:`rollouts`, end token left out.

    Those that nobody needs are wrong, but no prefix up to T-n leads there.
    """
    continued: dict[int, Tokens] = {}
    following: list[int] = []
    for i in range(len(ids) - 1, 0, -1):
        if not hits[i - 1]:
            following = list(written.get(i, ()))
        else:
            following = [] if ids[i] == end else [int(ids[i]), *following]
        continued[i] = following
    return continued


def filled(written: Tokens, length: int, end: int) -> list[int]:
    """A continuation with end tokens up to ``length``, as published code pads what ended."""
    return [*written, *[end] * (length - len(written))]


def decode_steps(lengths: Mapping[int, int], total: int) -> int:
    """Tokens that a model writes for continuations of these lengths, ends included.

    Args:
        lengths: i -> tokens written after the first i, end token left out.
        total: T.
    """
    return sum(min(length + 1, total - i) for i, length in lengths.items())
