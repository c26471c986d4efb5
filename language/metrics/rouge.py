"""ROUGE of greedy answers, as google's ``rouge_score`` with its Porter stemmer gives it.

Its tokenizer is used as it is, with every stem looked up once; the longest common subsequence is
rapidfuzz's.  Large jobs go to worker processes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np

WORTH_A_POOL = 20_000
"""Pairs above which starting worker processes (each imports the stemmer) pays."""


Kind = Literal["recall", "f1"]


class Rouge(NamedTuple):
    """Values in [0, 1], each (N,) float64."""

    rouge_1: np.ndarray
    rouge_l: np.ndarray


@functools.lru_cache(maxsize=1)
def _stemmer() -> SimpleNamespace:
    """nltk's Porter stemmer with a memory."""
    from nltk.stem import porter

    return SimpleNamespace(stem=functools.lru_cache(maxsize=None)(porter.PorterStemmer().stem))


def tokens_of(text: str, *, stem: bool = True) -> list[str]:
    """Lower-case alphanumeric words, those of more than three letters stemmed if asked for."""
    from rouge_score.tokenize import tokenize

    return tokenize(text, _stemmer() if stem else None)


def _values(pair: tuple[str, str], *, kind: Kind, stem: bool) -> tuple[float, float]:
    target, prediction = (tokens_of(text, stem=stem) for text in pair)
    if not target or not prediction:
        return 0.0, 0.0
    from rapidfuzz.distance import LCSseq

    words = (Counter(target) & Counter(prediction)).total()
    longest = LCSseq.similarity(target, prediction)
    if kind == "recall":
        return words / len(target), longest / len(target)
    return _f1(words, target, prediction), _f1(longest, target, prediction)


def _f1(shared: int, target: Sequence[str], prediction: Sequence[str]) -> float:
    """Harmonic mean of precision and recall; 0 where nothing is shared."""
    precision, recall = shared / len(prediction), shared / len(target)
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def rouge(
    targets: Sequence[str],
    predictions: Sequence[str],
    *,
    kind: Kind = "recall",
    stem: bool = True,
    workers: int = 0,
) -> Rouge:
    """ROUGE-1 and ROUGE-L of each prediction; 0 where either text has no word.

    Args:
        targets: Reference answers.
        predictions: As many texts.
        kind: ``recall`` (TOFU), or ``f1`` of precision and recall (MUSE).
        stem: Compare Porter stems instead of words.
        workers: Processes for :data:`WORTH_A_POOL` or more pairs; 0 computes here.
    """
    pairs = list(zip(targets, predictions, strict=True))
    value = functools.partial(_values, kind=kind, stem=stem)
    if workers and len(pairs) >= WORTH_A_POOL:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            values = list(pool.map(value, pairs, chunksize=-(-len(pairs) // (4 * workers))))
    else:
        values = [value(pair) for pair in pairs]
    table = np.asarray(values, dtype=np.float64).reshape(-1, 2)
    return Rouge(table[:, 0].copy(), table[:, 1].copy())
