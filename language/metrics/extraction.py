"""Extraction likelihood and memorisation accuracy, from tokens; no torch.

Both are of Jang et al., 2023 (arXiv 2210.01504), for a text x of T tokens and greedy decoding:

    MA(x)   = 1/(T-1) sum_{i=1}^{T-1} [argmax p(. | x_1..x_i) = x_{i+1}]
    EL_n(x) = 1/(T-n) sum_{i=1}^{T-n} OVL_n(g_i, x_{i+1}..x_T)

g_i is the greedy continuation of the first i tokens up to T tokens in all, and OVL_n(a, b) the
share of the n-grams of b's length that a has in common with b: every n-gram of a counts that is
one of b's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

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
        ids: The text.
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
