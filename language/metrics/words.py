"""Texts compared by their words, whatever their case, punctuation and articles."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain_words(text: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def token_f1(written: str, reference: str) -> float:
    """Harmonic mean of the shares of words that two texts have in common, counted with repeats.

    0 where there is none, as for an empty text.
    """
    first, second = plain_words(written), plain_words(reference)
    common = sum((Counter(first) & Counter(second)).values())
    return 2 * common / (len(first) + len(second)) if common else 0.0
