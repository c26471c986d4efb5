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


def summary_recall(target: str, prediction: str) -> float:
    """ROUGE-L recall as the package ``rouge`` 1.0.1 has it: summary level, of distinct words.

    Full stops end sentences and blanks end words; capitals and commas count.  The longest common
    subsequence of every sentence of one text and every one of the other gives words.  Their share
    in the distinct words of the target is the recall.

    Returns:
        In [0, 1]; 0 where the prediction has no sentence (there the package fails).
    """
    told, said = (
        [sentence.split() or [""] for sentence in text.split(".") if sentence]
        for text in (target, prediction)
    )
    shared: set[str] = set()
    for one in told:
        for other in said:
            shared |= _common_words(one, other)
    return len(shared) / len({word for sentence in told for word in sentence})


def _common_words(one: Sequence[str], other: Sequence[str]) -> set[str]:
    """Of one longest common subsequence; of several, that which goes back in ``other`` first."""
    length = np.zeros((len(one) + 1, len(other) + 1), dtype=int)
    for i, word in enumerate(one, 1):
        for j, opposite in enumerate(other, 1):
            best = max(length[i - 1, j], length[i, j - 1])
            length[i, j] = length[i - 1, j - 1] + 1 if word == opposite else best
    found, i, j = set(), len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            found.add(one[i])
        elif length[i - 1, j] > length[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return found


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
