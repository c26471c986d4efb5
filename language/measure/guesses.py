"""Guesses of what a model will write: what came after the same tokens before.

Collapsed models repeat themselves, and answers repeat their questions.  A guess is checked by the
forward that makes the next token, so it changes no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

LONGEST = 32
"""Tokens of a guess."""
FORWARD = 200
"""Token slots that cost as much as a forward does beside its slots."""


class Text:
    """A text, and what came after each pair of its tokens when it stood there last."""

    def __init__(self, tokens: Iterable[int]):
        self.tokens: list[int] = []
        self.after: dict[tuple[int, int], int] = {}
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """More tokens at the end."""
        for token in tokens:
            if len(self.tokens) > 1:
                self.after[self.tokens[-2], self.tokens[-1]] = len(self.tokens)
            self.tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """At most ``most`` tokens that may follow: the more, the longer the repeated part is."""
        text, most = self.tokens, min(most, LONGEST)
        place = self.after.get((text[-2], text[-1])) if len(text) > 1 and most > 0 else None
        if place is None:
            return []
        shared, end = 2, place - 1
        while 2 * shared < most + 2 and shared <= end and text[end - shared] == text[-1 - shared]:
            shared += 1
        period = len(text) - place
        return [text[place + k % period] for k in range(min(2 * (shared - 1), most))]


def worth(guesses: Sequence[list[int]], room: int) -> list[list[int]]:
    """Guesses of one batch, cut to the width (at most ``room`` slots) that writes most per cost."""
    sizes = np.asarray([len(guess) for guess in guesses], dtype=np.int64)
    widths = [1, *(1 + np.unique(sizes[(sizes > 0) & (sizes < room)])).tolist()]
    rates = [np.minimum(1 + sizes, w).sum() / (FORWARD + len(sizes) * w) for w in widths]
    width = widths[int(np.argmax(rates))]
    return [guess[: width - 1] for guess in guesses]


def met(said: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
    """What a model says as long as the guess is right, and the token after it."""
    right = [token == guessed for token, guessed in zip(said, guess, strict=False)]
    return said[: 1 + [*right, False].index(False)]
