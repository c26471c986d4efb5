"""All parts of an evaluation in one pass: likelihoods of every answer once, then greedy answers.

Parts may overlap and answers may coincide: each (question, answer) is scored once, each question
is answered once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from common.measure.scores import COLUMNS, Scores
from language.data.corpus import Encoded, Item
from language.measure.evaluation import TofuEvaluation
from language.measure.generation import generate
from language.measure.likelihood import AnswerScores, teacher_forced
from language.metrics.memorization import exact_memorization, extraction_strength, min_k
from language.metrics.rouge import rouge_recall
from language.metrics.tofu import HOLDOUT

if TYPE_CHECKING:
    from torch import nn

    from language.data.source import TextSource

__all__ = ["AnswerScores", "score_parts", "teacher_forced"]

Columns = dict[str, np.ndarray]


def score_parts(
    model: nn.Module,
    source: TextSource,
    parts: Mapping[str, np.ndarray],
    config: TofuEvaluation,
    *,
    trial: bool,
) -> dict[str, Scores]:
    """Scores of every part, in the order of its indices.

    Args:
        model: A causal language model.
        source: Questions and answers as token ids.
        parts: Int64 index sets into the source's corpus.  Of ``holdout`` only answers are scored.
        config: Conventions and sizes of batches.
        trial: Likelihoods only, no greedy answers.

    Returns:
        Part -> scores, whose scalar columns are means over the answer's tokens, with ``extra``:
        ``answer_loss``, ``answer_tokens``, ``extraction_strength``, ``exact_memorization`` and
        ``min_k`` (N,); but for holdout also ``paraphrase_loss`` (N,) (the answer's where there is
        no paraphrase), ``perturbed_loss`` (N, K) and ``perturbed_count`` (N,) (columns beyond the
        count are 0); and, unless it is a trial, ``rouge_1_recall`` and ``rouge_l_recall`` (N,).

    Raises:
        Diverged: A scored logit is NaN or infinite.
        DataError: An answer has no label within the length limit.
    """
    job = _Job(source, parts)
    answers = teacher_forced(
        model,
        job.pairs,
        token_budget=config.token_budget,
        share_prompts=config.share_prompts,
        detailed=job.detailed,
        masked_id=_masked_id(source, config),
    )
    measured = {part: job.columns(part, answers, config) for part in parts}
    if not trial:
        texts = _Texts(model, source, config, job.asked)
        for part in set(parts) - {HOLDOUT}:
            measured[part] |= texts.columns(job.items(part))
    means = {part: answers.means[job.answers[part]].astype(np.float32) for part in parts}
    return {
        part: Scores(
            indices=np.asarray(indices, dtype=np.int64),
            **{name: np.ascontiguousarray(means[part][:, k]) for k, name in enumerate(COLUMNS)},
            extra=measured[part],
        )
        for part, indices in parts.items()
    }


def _masked_id(source: TextSource, config: TofuEvaluation) -> int | None:
    """The peer's attention mask is ``ids != pad``, with the end token as padding if none is set."""
    if config.style != "openunlearning":
        return None
    pad = source.tokenizer.pad_token_id
    return source.tokenizer.eos_token_id if pad is None else pad


def _key(item: Item) -> tuple[str, str]:
    return item.question, item.answer


@dataclass
class _Job:
    """Which pairs the parts need, each once."""

    source: TextSource
    parts: Mapping[str, np.ndarray]
    pairs: list[Encoded] = field(default_factory=list)
    answers: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._places: dict[tuple[str, str], int] = {}
        wanted: set[int] = set()
        for part in self.parts:
            items = self.items(part)
            self.answers[part] = self._put(items, [item.answer for item in items])
            wanted |= set(self.answers[part].tolist())
            if part != HOLDOUT:
                for item in items:
                    others = [*item.perturbed, *([item.paraphrase] if item.paraphrase else [])]
                    self._put([item] * len(others), others)
        self.detailed = np.isin(np.arange(len(self.pairs)), sorted(wanted))

    def items(self, part: str) -> list[Item]:
        """The part's items, in order."""
        return [self.source.corpus.items[index] for index in self.parts[part].tolist()]

    @property
    def asked(self) -> list[Item]:
        """Items of all parts that are to be answered, each once."""
        parts = [self.items(part) for part in self.parts if part != HOLDOUT]
        return list({_key(item): item for items in parts for item in items}.values())

    def _put(self, items: Sequence[Item], answers: Sequence[str]) -> np.ndarray:
        places = []
        for item, answer in zip(items, answers, strict=True):
            key = (item.question, answer)
            if key not in self._places:
                self._places[key] = len(self.pairs)
                self.pairs.append(self.source.encode(*key))
            places.append(self._places[key])
        return np.asarray(places, dtype=np.int64)

    def columns(self, part: str, scores: AnswerScores, config: TofuEvaluation) -> Columns:
        """What the likelihoods say about a part."""
        chosen = self.answers[part]
        loss = scores.mean_loss
        counted = scores.select(chosen).without_last(self._dropped(chosen, config))
        columns: Columns = {
            "answer_loss": loss[chosen],
            "answer_tokens": scores.counts[chosen],
            "extraction_strength": extraction_strength(
                counted.hits, counted.counts, floor=config.style == "openunlearning"
            ),
            "exact_memorization": exact_memorization(counted.hits, counted.counts),
            "min_k": min_k(counted.token_loss, counted.counts, config.min_k),
        }
        return columns if part == HOLDOUT else columns | self._compared(part, loss)

    def _dropped(self, chosen: np.ndarray, config: TofuEvaluation) -> np.ndarray:
        """(N,) bool: answers whose last token is not counted: an end token, or the peer's any."""
        end = self.source.encoder.end
        always = config.style == "openunlearning"
        return np.asarray([always or self.pairs[place].ids[-1] == end for place in chosen])

    def _compared(self, part: str, loss: np.ndarray) -> Columns:
        items = self.items(part)
        paraphrases = self._put(items, [item.paraphrase or item.answer for item in items])
        counts = np.asarray([len(item.perturbed) for item in items], dtype=np.int64)
        perturbed = np.zeros((len(items), int(counts.max(initial=0))))
        for row, item in zip(perturbed, items, strict=True):
            places = self._put([item] * len(item.perturbed), item.perturbed)
            row[: len(places)] = loss[places]
        return {
            "paraphrase_loss": loss[paraphrases],
            "perturbed_loss": perturbed,
            "perturbed_count": counts,
        }


class _Texts:
    """Greedy answers to questions, and their ROUGE."""

    def __init__(
        self,
        model: nn.Module,
        source: TextSource,
        config: TofuEvaluation,
        items: Sequence[Item],
    ):
        self.source, self.config = source, config
        prompts = [source.prompt_ids(item.question) for item in items]
        said = generate(
            model,
            prompts,
            stop=self._stops(model),
            max_new_tokens=[
                self._limit(item, prompt) for item, prompt in zip(items, prompts, strict=True)
            ],
            batch_size=config.generation_batch,
            token_budget=config.token_budget,
        )
        texts = [self._text(tokens) for tokens in said]
        found = rouge_recall(
            [self._target(item) for item in items], texts, workers=config.rouge_workers
        )
        rows = zip(found.rouge_1.tolist(), found.rouge_l.tolist(), strict=True)
        self.answers = dict(zip(map(_key, items), texts, strict=True))
        self._recalls = dict(zip(map(_key, items), rows, strict=True))

    def columns(self, items: Sequence[Item]) -> Columns:
        """``rouge_1_recall`` and ``rouge_l_recall`` of the items."""
        table = np.asarray([self._recalls[_key(item)] for item in items]).reshape(-1, 2)
        return {"rouge_1_recall": table[:, 0].copy(), "rouge_l_recall": table[:, 1].copy()}

    def _stops(self, model: Any) -> set[int]:
        configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        more = configured if isinstance(configured, Iterable) else [configured]
        own = [self.source.encoder.end, self.source.tokenizer.eos_token_id]
        return {token for token in (*own, *more) if token is not None}

    def _limit(self, item: Item, prompt: np.ndarray) -> int:
        limit = self.config.max_new_tokens
        if self.config.style == "tofu":
            limit = max(1, limit - len(prompt))
        if self.config.reference_cap is None:
            return limit
        labels = len(self.source.encode(item.question, item.answer).labels)
        return min(limit, math.ceil(self.config.reference_cap * labels))

    def _decode(self, tokens: np.ndarray) -> str:
        return self.source.tokenizer.decode(
            tokens.tolist(),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=self.config.style == "openunlearning",
        )

    def _text(self, tokens: np.ndarray) -> str:
        text = self._decode(tokens)
        if self.config.style == "openunlearning":
            text = text.split(self.source.tokenizer.eos_token)[0]
        return text.strip()

    def _target(self, item: Item) -> str:
        if self.config.style != "openunlearning":
            return item.answer
        prompt = self._decode(self.source.prompt_ids(item.question))
        whole = self._decode(self.source.encode(item.question, item.answer).ids)
        return whole.replace(prompt, "").strip()
