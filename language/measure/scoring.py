"""What questions with answers are measured by, in TOFU's conventions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.config import Style
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.measure.requests import (
    Columns,
    Continue,
    Likelihood,
    Replies,
    Request,
    RequestConfig,
    TextMetric,
)
from stable_forgetting.language.metrics.memorization import (
    exact_memorization,
    extraction_strength,
    min_k,
)
from stable_forgetting.language.metrics.rouge import rouge
from stable_forgetting.language.metrics.tofu import HOLDOUT, FQReference, Truth

if TYPE_CHECKING:
    from torch import nn


class TofuEvaluation(RequestConfig):
    """How TOFU's measurements are taken.

    Attributes:
        style: Conventions of the metrics (the model's template has its own ``style``; a comparison
            with published numbers wants the same in both).  ``tofu`` limits prompt and answer
            together to ``max_new_tokens``; ``openunlearning`` takes the targets of ROUGE from
            decoded tokens, leaves the last label out of what counts tokens, and hides from
            attention whatever has the padding token's id.
        truth: What the truth-ratio metrics average: ``ratio``, or the ``mass`` of the right answer.
        fq_reference: Rows that forget quality compares with; see
            :func:`language.metrics.tofu.tofu_compare`.
        min_k: Share of the least likely tokens that the membership score looks at.
        max_new_tokens: Longest greedy answer.
        reference_cap: Stop an answer at this many times the tokens of its reference; None lets it
            run.  Below 1 recall suffers; well above it only babble is lost.
        rouge_workers: Processes for ROUGE when there is enough of it; 0 for none.
        retain_samples: Score at most this many retained rows that have wrong answers to compare
            with (hash-ordered draw); all of them when absent.
    """

    style: Style = "clean"
    truth: Truth = "ratio"
    fq_reference: FQReference = "tofu"
    min_k: Annotated[float, Field(gt=0, le=1)] = 0.4
    max_new_tokens: Count = 200
    reference_cap: Annotated[float, Field(gt=0)] | None = None
    rouge_workers: Annotated[int, Field(ge=0)] = 0
    retain_samples: Count | None = None


def score_parts(
    model: nn.Module,
    source: TextSource,
    parts: Mapping[str, np.ndarray],
    config: TofuEvaluation,
    *,
    trial: bool,
) -> dict[str, Scores]:
    """Scores of every part; ``extra`` holds the columns of :class:`Answers`, but for ``holdout``
    also those of :class:`WrongAnswers` and, unless it is a trial, of :class:`GreedyAnswers`.

    See :func:`language.measure.ask.score_rows`.
    """
    from stable_forgetting.language.measure.ask import score_rows

    metrics = {part: answer_metrics(part, config, trial=trial) for part in parts}
    masked = masked_id(source, config)
    return score_rows(model, source, parts, metrics, config, masked_id=masked)


def answer_metrics(part: str, config: TofuEvaluation, *, trial: bool) -> list[TextMetric]:
    """What is measured on a part."""
    metrics: list[TextMetric] = [Answers(config)]
    if part != HOLDOUT:
        metrics += [WrongAnswers()] if trial else [WrongAnswers(), GreedyAnswers(config)]
    return metrics


def masked_id(source: TextSource, config: TofuEvaluation) -> int | None:
    """The peer's attention mask is ``ids != pad``, with the end token as padding if none is set."""
    return source.padding_id if config.style == "openunlearning" else None


def _likelihoods(
    source: TextSource, items: Sequence[Item], answers: Iterable[str]
) -> list[Likelihood]:
    rows = list(zip(items, answers, strict=True))
    source.encoder.prepare((item.question, answer) for item, answer in rows)
    return [Likelihood.of(source.encode(item.question, answer)) for item, answer in rows]


class Answers(TextMetric):
    """What the likelihood of the answer itself says.

    Columns, (N,) each: ``answer_loss``, ``answer_tokens``, ``extraction_strength``,
    ``exact_memorization`` and ``min_k``.
    """

    def __init__(self, config: TofuEvaluation):
        self.config = config
        self.peer = config.style == "openunlearning"

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Likelihood]:
        """The answer of each row."""
        return _likelihoods(source, items, [item.answer for item in items])

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """Means, and what counts tokens: without an end token, or the peer's last of any kind."""
        requests = self.requests(source, items)
        scores = replies.scores(requests)
        end = source.encoder.end
        dropped = np.asarray([self.peer or request.ids[-1] == end for request in requests], bool)
        counted = scores.without_last(dropped)
        return {
            "answer_loss": scores.mean_loss,
            "answer_tokens": scores.counts,
            "extraction_strength": extraction_strength(
                counted.hits, counted.counts, floor=self.peer
            ),
            "exact_memorization": exact_memorization(counted.hits, counted.counts),
            "min_k": min_k(counted.token_loss, counted.counts, self.config.min_k),
        }


class WrongAnswers(TextMetric):
    """Likelihoods of the paraphrase and of the wrong answers.

    Columns: ``paraphrase_loss`` (N,) (the answer's where there is no paraphrase),
    ``perturbed_loss`` (N, K) and ``perturbed_count`` (N,); columns beyond the count are 0.
    """

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Likelihood]:
        """Wrong answers and the paraphrase, row by row."""
        others = [
            (item, answer)
            for item in items
            for answer in (*item.perturbed, item.paraphrase or item.answer)
        ]
        return _likelihoods(source, [item for item, _ in others], [text for _, text in others])

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """Mean losses in nats per token."""
        right = _likelihoods(source, items, [item.paraphrase or item.answer for item in items])
        counts = np.asarray([len(item.perturbed) for item in items], dtype=np.int64)
        wrong = np.zeros((len(items), int(counts.max(initial=0))))
        for row, item in zip(wrong, items, strict=True):
            answers = _likelihoods(source, [item] * len(item.perturbed), item.perturbed)
            row[: len(answers)] = replies.scores(answers).mean_loss
        return {
            "paraphrase_loss": replies.scores(right).mean_loss,
            "perturbed_loss": wrong,
            "perturbed_count": counts,
        }


class GreedyAnswers(TextMetric):
    """ROUGE recall of greedy answers: ``rouge_1_recall`` and ``rouge_l_recall``, (N,) each.

    No column for a part with rows that ask nothing (plain texts).
    """

    def __init__(self, config: TofuEvaluation):
        self.config = config
        self.peer = config.style == "openunlearning"

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Request]:
        """The question of each row."""
        if not all(item.question for item in items):
            return []
        return [self._asked(source, item) for item in items]

    def _asked(self, source: TextSource, item: Item) -> Continue:
        prompt = source.prompt_ids(item.question)
        limit = self.config.max_new_tokens
        if self.config.style == "tofu":
            limit = max(1, limit - len(prompt))
        if self.config.reference_cap is not None:
            labels = len(source.encode(item.question, item.answer).labels)
            limit = min(limit, math.ceil(self.config.reference_cap * labels))
        return Continue(tuple(prompt.tolist()), source.encoder.room_after(len(prompt), limit))

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """Recalls of the targets' words."""
        if not all(item.question for item in items):
            return {}
        tokens = replies.tokens([self._asked(source, item) for item in items])
        answers = [self._text(source, row) for row in tokens]
        targets = [self._target(source, item) for item in items]
        recalls = rouge(targets, answers, workers=self.config.rouge_workers)
        return {"rouge_1_recall": recalls.rouge_1, "rouge_l_recall": recalls.rouge_l}

    def _text(self, source: TextSource, tokens: np.ndarray) -> str:
        text = source.decode(tokens.tolist(), clean_up=self.peer)
        if self.peer:
            text = text.split(source.tokenizer.eos_token)[0]
        return text.strip()

    def _target(self, source: TextSource, item: Item) -> str:
        if not self.peer:
            return item.answer
        prompt = source.decode(source.prompt_ids(item.question).tolist(), clean_up=True)
        pair = source.encode(item.question, item.answer)
        whole = source.decode(pair.ids.tolist(), clean_up=True)
        return whole.replace(prompt, "").strip()
