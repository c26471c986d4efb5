"""ROUGE recall of greedy answers, as google's ``rouge_score`` with its Porter stemmer gives it.

Its tokenizer is used as it is, with every stem looked up once; the longest common subsequence comes
from whole rows of bits instead of a table of cells.  Large jobs go to worker processes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WORTH_A_POOL = 20_000
"""Pairs above which starting worker processes (each imports the stemmer) pays."""


class RougeRecall(NamedTuple):
    """Recalls in [0, 1], each (N,) float64."""

    rouge_1: np.ndarray
    rouge_l: np.ndarray


class _Stemmer:
    """nltk's Porter stemmer with a memory."""

    def __init__(self) -> None:
        from nltk.stem import porter

        self.stem = functools.lru_cache(maxsize=None)(porter.PorterStemmer().stem)


@functools.lru_cache(maxsize=1)
def _stemmer() -> _Stemmer:
    return _Stemmer()


def tokens_of(text: str) -> list[str]:
    """Lower-case alphanumeric words, those of more than three letters stemmed."""
    from rouge_score.tokenize import tokenize

    return tokenize(text, _stemmer())


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence (bit-parallel: Hyyrö 2004)."""
    where: dict[str, int] = {}
    for place, token in enumerate(first):
        where[token] = where.get(token, 0) | 1 << place
    row = full = (1 << len(first)) - 1
    for token in second:
        matches = row & where.get(token, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(first) - row.bit_count()


def _recalls(pair: tuple[str, str]) -> tuple[float, float]:
    target, prediction = tokens_of(pair[0]), tokens_of(pair[1])
    if not target or not prediction:
        return 0.0, 0.0
    shared = (Counter(target) & Counter(prediction)).total()
    return shared / len(target), common_subsequence(target, prediction) / len(target)


def rouge_recall(
    targets: Sequence[str], predictions: Sequence[str], *, workers: int = 0
) -> RougeRecall:
    """ROUGE-1 and ROUGE-L recall of each prediction; 0 where either text has no word.

    Args:
        targets: Reference answers.
        predictions: As many texts.
        workers: Processes for :data:`WORTH_A_POOL` or more pairs; 0 computes here.
    """
    pairs = list(zip(targets, predictions, strict=True))
    if workers and len(pairs) >= WORTH_A_POOL:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            found = list(pool.map(_recalls, pairs, chunksize=-(-len(pairs) // (4 * workers))))
    else:
        found = [_recalls(pair) for pair in pairs]
    table = np.asarray(found, dtype=np.float64).reshape(-1, 2)
    return RougeRecall(table[:, 0], table[:, 1])
