"""What is asked of a causal model, and what a metric makes of the replies.

Three requests are enough: how likely are these tokens, how does this go on, which of these.  A
:class:`TextMetric` declares its requests for the rows of a part and turns the replies into columns
of :attr:`common.measure.scores.Scores.extra`; :mod:`language.measure.ask` puts the requests of all
metrics together, asks each once, and packs and batches them.  No torch here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.language.data.corpus import Encoded, Item
from stable_forgetting.language.data.source import TextSource

Columns = dict[str, np.ndarray]


class RequestConfig(Strict):
    """How requests to a model are batched.

    Attributes:
        token_budget: Token slots per forward.
        generation_batch: Rows per batch of greedy answers.
        share_prompts: Put a question's answers behind one copy of its prompt, where the model can.
    """

    token_budget: Count = 8192
    generation_batch: Count = 128
    share_prompts: bool = True


@dataclass(frozen=True)
class Likelihood:
    """How likely is every token from ``start`` on?

    Attributes:
        ids: All tokens, prompt first.
        start: First position that is scored, 1 or more.
    """

    ids: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, pair: Encoded) -> Likelihood:
        """Of an answer after its prompt."""
        return cls(tuple(pair.ids.tolist()), pair.start)


@dataclass(frozen=True)
class Continue:
    """What does the model greedily write next?

    Attributes:
        ids: The prompt, one token or more.
        limit: Most tokens to write.
        stop: Tokens that end the text; the end tokens of tokenizer, template and model when None.
        stop_text: Strings that end it.
    """

    ids: tuple[int, ...]
    limit: int
    stop: frozenset[int] | None = None
    stop_text: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choose:
    """Which of several continuations is the likeliest?

    Attributes:
        prompt: Tokens before every option, one or more.
        options: Tokens of each option, one or more each.
    """

    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]

    @property
    def likelihoods(self) -> tuple[Likelihood, ...]:
        """One request per option."""
        start = len(self.prompt)
        return tuple(Likelihood(self.prompt + option, start) for option in self.options)


Request = Likelihood | Continue | Choose


def before_stop(text: str, stop_text: Sequence[str]) -> str:
    """The text up to the first of the strings that is in it."""
    ends = [text.index(stop) for stop in stop_text if stop in text]
    return text[: min(ends, default=len(text))]


@dataclass(frozen=True, eq=False)
class AnswerScores:
    """What a model says about each token of each answer; answers one after the other.

    Attributes:
        counts: (P,) int64 labels per pair.
        token_loss: (T,) float64 nats, -log p of each label.
        hits: (T,) bool, whether the argmax is the label.
        means: (P, len(COLUMNS)) float64 token means of the columns of
            :class:`common.measure.scores.Scores`; NaN for pairs that were not asked for in detail.
    """

    counts: np.ndarray
    token_loss: np.ndarray
    hits: np.ndarray
    means: np.ndarray

    @property
    def owner(self) -> np.ndarray:
        """(T,) the pair of each token."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def sum_loss(self) -> np.ndarray:
        """(P,) nats."""
        return np.bincount(self.owner, weights=self.token_loss, minlength=len(self.counts))

    @property
    def mean_loss(self) -> np.ndarray:
        """(P,) nats per token: -log of the length-normalised probability."""
        return self.sum_loss / self.counts

    def without_last(self, drop: np.ndarray) -> AnswerScores:
        """The same without the last token of the pairs in ``drop``, (P,) bool."""
        last = np.zeros(len(self.token_loss), dtype=bool)
        last[np.cumsum(self.counts)[drop] - 1] = True
        rest = ~last
        return AnswerScores(self.counts - drop, self.token_loss[rest], self.hits[rest], self.means)

    def select(self, pairs: np.ndarray) -> AnswerScores:
        """The pairs at ``pairs`` (int64), in that order."""
        starts = np.cumsum(self.counts) - self.counts
        tokens = [np.arange(starts[p], starts[p] + self.counts[p]) for p in pairs]
        where = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
        return AnswerScores(
            self.counts[pairs], self.token_loss[where], self.hits[where], self.means[pairs]
        )


@dataclass(frozen=True, eq=False)
class Replies:
    """A model's replies, looked up by request.

    Attributes:
        places: Likelihood -> its place in ``scored``.
        scored: Of all likelihoods.
        written: Continuation -> int64 tokens; the one that completes a stop string is the last.
    """

    places: Mapping[Likelihood, int]
    scored: AnswerScores
    written: Mapping[Continue, np.ndarray]

    def scores(self, requests: Sequence[Likelihood]) -> AnswerScores:
        """Of the requests, in their order."""
        return self.scored.select(np.asarray([self.places[r] for r in requests], dtype=np.int64))

    def tokens(self, requests: Sequence[Continue]) -> list[np.ndarray]:
        """What was written."""
        return [self.written[request] for request in requests]

    def choices(self, requests: Sequence[Choose]) -> list[np.ndarray]:
        """(options,) float64 log-probabilities in nats of each request's options."""
        return [-self.scores(request.likelihoods).sum_loss for request in requests]


class TextMetric(ABC):
    """A measurement of every row of a part."""

    @abstractmethod
    def requests(self, source: TextSource, items: Sequence[Item]) -> Iterable[Request]:
        """What the model is asked about the rows; the same request may come many times."""

    def follow_up(
        self, source: TextSource, items: Sequence[Item], replies: Replies
    ) -> Iterable[Continue]:
        """What is asked once the replies to :meth:`requests` are there; nothing by default."""
        return ()

    @abstractmethod
    def columns(
        self, source: TextSource, items: Sequence[Item], replies: Replies
    ) -> Mapping[str, np.ndarray]:
        """Column -> (N,) or (N, K), from the replies to all of this metric's requests."""
