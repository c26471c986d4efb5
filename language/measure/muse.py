"""MUSE's questions to a model: what follows, what is the answer, how likely is the text.

Three styles.  ``muse`` is the authors' evaluation.  ``openunlearning`` is that of open-unlearning:
stems in ROUGE, prompts of questions cut at 512 tokens, the last token of a text left out.
``clean`` ends the prompt of a question before the space (``Answer:``), so that the answer's first
token is one that the model saw in training, and counts 128 tokens of a truth without the start
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from stable_forgetting.language.data.corpus import Encoded, Item
from stable_forgetting.language.data.prompts import FewShot
from stable_forgetting.language.measure.requests import (
    Columns,
    Continue,
    Likelihood,
    Replies,
    TextMetric,
    before_stop,
)
from stable_forgetting.language.metrics.memorization import (
    exact_memorization,
    extraction_strength,
    min_k,
)
from stable_forgetting.language.metrics.muse import MuseStyle
from stable_forgetting.language.metrics.rouge import rouge

if TYPE_CHECKING:
    from stable_forgetting.language.data.source import TextSource

VERBATIM_TOKENS = 128
ANSWER_TOKENS = 32
PEER_QUESTION_TOKENS = 512
PEER_TEXT_TOKENS = 2048
"""Limits of open-unlearning's data sets, in tokens."""
MIN_K = 0.4
CLEAN_QUESTION = "Question: {question}\nAnswer:"


class Conventions:
    """How a row becomes tokens in a style.

    Args:
        source: Tokenizer.
        style: See the module docstring.
        window: Tokens that the model can see; longer prompts lose their beginning, longer texts
            their end, with a warning.
        shots: Set -> solved questions that stand before its own.
    """

    def __init__(
        self,
        source: TextSource,
        style: MuseStyle,
        window: int,
        shots: Mapping[str, Sequence[Item]],
    ):
        self.source, self.style, self.window = source, style, window
        plain = style != "clean"
        self.shots = {
            name: FewShot.of(items) if plain else _exact(items) for name, items in shots.items()
        }
        self._prompts: dict[Item, list[int]] = {}
        self._sequences: dict[Item, Encoded] = {}

    def prompt(self, item: Item) -> list[int]:
        """What a row's text is written after, within the window."""
        if item not in self._prompts:
            ids = self.source.encoder.text(self._words(item))
            limit = VERBATIM_TOKENS
            if item.set in self.shots:
                limit = ANSWER_TOKENS
                ids = ids[:PEER_QUESTION_TOKENS] if self.style == "openunlearning" else ids
            self._prompts[item] = self.source.encoder.ending(ids, self.window - limit)
        return self._prompts[item]

    def _words(self, item: Item) -> str:
        if item.set in self.shots:
            return self.shots[item.set].prompt(item.question)
        return item.question

    def sequence(self, item: Item) -> Encoded:
        """A whole text from its second token on, or the truth after its prompt."""
        if item not in self._sequences:
            ids, start = self._tokens(item)
            self._sequences[item] = Encoded(np.asarray(ids, dtype=np.int64), start)
        return self._sequences[item]

    def _tokens(self, item: Item) -> tuple[list[int], int]:
        encoder, peer = self.source.encoder, self.style == "openunlearning"
        if not item.question:
            ids = encoder.text(item.answer)
            limit = self.window
            if peer:
                limit = min(limit, PEER_TEXT_TOKENS + len(encoder.text("")))
            return encoder.beginning(ids, limit), 1
        prompt = self.prompt(item)
        return encoder.beginning([*prompt, *self._truth(item)], self.window), len(prompt)

    def _truth(self, item: Item) -> list[int]:
        """Tokens of the truth after the prompt."""
        encoder = self.source.encoder
        if self.style == "openunlearning" and item.set not in self.shots:
            whole = encoder.text(f"{item.question} {item.answer}")
            return whole[len(encoder.text(item.question)) :][:PEER_TEXT_TOKENS]
        gap = "" if item.set in self.shots and self.style != "clean" else " "
        return encoder.continuation(gap + item.answer)[:VERBATIM_TOKENS]

    def target(self, item: Item) -> str:
        """What a written text is compared with."""
        asked = item.set in self.shots
        if self.style == "openunlearning":
            return self._peer_target(item)
        if asked:
            return item.answer
        ids = self._truth(item)
        if self.style == "muse":
            ids = self.source.encoder.text(item.answer)[:VERBATIM_TOKENS]
        return self.source.decode(ids, clean_up=self.style == "muse")

    def _peer_target(self, item: Item) -> str:
        """Decoded labels, without what the prompt says."""
        encoder, prompt = self.source.encoder, self._words(item)
        given, ids = encoder.text(prompt), self._truth(item)
        if item.set in self.shots:
            given = given[:PEER_QUESTION_TOKENS]
            ids = encoder.text(prompt + item.answer)[:PEER_QUESTION_TOKENS]
        before = self.source.decode(given, clean_up=True)
        return self.source.decode(ids, clean_up=True).replace(before, "").strip()

    def written(self, tokens: np.ndarray, stop_text: Sequence[str]) -> str:
        """The text that a model wrote, up to the first of the strings."""
        text = self.source.decode(tokens.tolist(), clean_up=self.style != "clean")
        text = before_stop(text, stop_text)
        return text if self.style == "muse" else text.strip()


def _exact(items: Sequence[Item]) -> FewShot:
    """Shots whose last question ends without a space."""
    shots = tuple((item.question, f" {item.answer}") for item in items)
    return FewShot(shots, question=CLEAN_QUESTION)


class Written(TextMetric):
    """ROUGE-L F1 of what a model writes: ``rouge_l_f1`` (N,)."""

    generates: ClassVar[bool] = True

    def __init__(self, conventions: Conventions, *, workers: int = 0):
        self.conventions, self.workers = conventions, workers

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Continue]:
        """128 tokens after a beginning, or 32 after a question."""
        return [self._asked(item) for item in items]

    def _asked(self, item: Item) -> Continue:
        few = self.conventions.shots.get(item.set)
        limit = ANSWER_TOKENS if few else VERBATIM_TOKENS
        ends = few.ends if few else ()
        return Continue(tuple(self.conventions.prompt(item)), limit, stop_text=ends)

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """Of each row."""
        asked = self.requests(source, items)
        replied = zip(replies.tokens(asked), asked, strict=True)
        texts = [self.conventions.written(tokens, request.stop_text) for tokens, request in replied]
        values = rouge(
            [self.conventions.target(item) for item in items],
            texts,
            kind="f1",
            stem=self.conventions.style == "openunlearning",
            workers=self.workers,
        )
        return {"rouge_l_f1": values.rouge_l}


class Recited(TextMetric):
    """``extraction_strength``, ``exact_memorization`` and ``min_k`` of each sequence, (N,)."""

    def __init__(self, conventions: Conventions):
        self.conventions = conventions

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Likelihood]:
        """Every sequence."""
        return [Likelihood.of(self.conventions.sequence(item)) for item in items]

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """Of all labels, or without the last one of each."""
        peer = self.conventions.style == "openunlearning"
        scores = replies.scores(self.requests(source, items))
        scores = scores.without_last(np.full(len(items), peer))
        counts, hits = scores.counts, scores.hits
        return {
            "extraction_strength": extraction_strength(hits, counts, floor=peer),
            "exact_memorization": exact_memorization(hits, counts),
            "min_k": min_k(scores.token_loss, counts, MIN_K),
        }
