"""MUSE: what a model is asked, and the numbers, one model's and against Retrain.  Percent.

Three styles.  ``muse`` is the authors' evaluation.  ``openunlearning`` is that of open-unlearning:
stems in ROUGE, prompts of questions cut at 512 tokens, the last token of a text left out.
``clean`` ends the prompt of a question before the space (``Answer:``), so that the answer's first
token is one that the model saw in training, and counts 128 tokens of a truth without the start
token.

Source: Shi et al. 2024 (arXiv 2407.06460) and its repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from stable_forgetting.common.measure.goal import ConstantGoal, Goal, RetrainGoal
from stable_forgetting.common.measure.rules import Criterion, RuleSet
from stable_forgetting.language.data.corpus import Encoded, Item
from stable_forgetting.language.data.source import TextSource
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
    membership_auc,
    min_k,
    privacy_leakage,
)
from stable_forgetting.language.metrics.rouge import rouge

VERBATIM_TOKENS = 128
ANSWER_TOKENS = 32
PEER_QUESTION_TOKENS = 512
PEER_TEXT_TOKENS = 2048
"""Limits of open-unlearning's data sets, in tokens."""
MIN_K = 0.4
QUESTION_ENDS = ("\n\n", "\nQuestion", "Question:")
"""Strings with which a model begins the next question; they end its answer."""


class Conventions:
    """How a row becomes tokens in a style.

    Args:
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
        self.shots = shots
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
        if item.set not in self.shots:
            return item.question
        solved = [f"Question: {row.question}\nAnswer: {row.answer}" for row in self.shots[item.set]]
        gap = "" if self.style == "clean" else " "
        return "\n\n".join([*solved, f"Question: {item.question}\nAnswer:{gap}"])

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


class Written(TextMetric):
    """ROUGE-L F1 of what a model writes: ``rouge_l_f1`` (N,)."""

    def __init__(self, conventions: Conventions, *, workers: int = 0):
        self.conventions, self.workers = conventions, workers

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Continue]:
        """128 tokens after a beginning, or 32 after a question."""
        return [self._asked(item) for item in items]

    def _asked(self, item: Item) -> Continue:
        prompt = tuple(self.conventions.prompt(item))
        if item.set in self.conventions.shots:
            return Continue(prompt, ANSWER_TOKENS, stop_text=QUESTION_ENDS)
        return Continue(prompt, VERBATIM_TOKENS)

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


MuseStyle = Literal["muse", "openunlearning", "clean"]
Reference = Literal["retrain", "news", "books"]

PUBLISHED_AUC: Mapping[str, float] = {"news": 0.4772, "books": 0.5393}
"""Chance that a held-out text is likelier (Min-40 %) than one of the forget set under the retrained
LLaMA-2 7B: AUC_RETRAIN, forget_holdout_Min-40%, in constants.py of swj0419/muse_bench (fcd6651)."""


def _memorisation(*names: str) -> tuple[Goal, ...]:
    return tuple(RetrainGoal(name, inclusive=True) for name in names)


def _rule_set(name: str, source: str, *goals: Goal) -> RuleSet:
    numbers = ("C1", "C2", "C3", "C3'", "C4") if len(goals) == 5 else ("C1", "C2", "C3", "C4")
    return RuleSet(name, source, tuple(map(Criterion, numbers, goals)))


_BAND = "PrivLeak within 5 % of Retrain's"
RULE_SETS = (
    _rule_set(
        "muse",
        "Shi et al. 2024; it sets C4 no limit, so here it is Retrain's value",
        *_memorisation("verbmem", "knowmem_f"),
        ConstantGoal("privleak", -5.0, _BAND, reach="above", inclusive=True),
        ConstantGoal("privleak", 5.0, _BAND, inclusive=True),
        RetrainGoal("knowmem_r", reach="above", inclusive=True),
    ),
    _rule_set(
        "paper",
        "the paper's limits: 20.8, 33.1, 0 and 27.5 for MUSE-News on LLaMA-2 7B, where Retrain has"
        " 20.8, 33.1 and 55.0",
        *_memorisation("verbmem", "knowmem_f"),
        ConstantGoal("privleak", 0.0, "any over-unlearning passes", reach="above", inclusive=True),
        RetrainGoal("knowmem_r", reach="above", share=0.5, inclusive=True),
    ),
    _rule_set(
        "paper_news_7b",
        "the paper's limits as constants, for MUSE-News on LLaMA-2 7B alone",
        ConstantGoal("verbmem", 20.8, "Retrain in MUSE's table", inclusive=True),
        ConstantGoal("knowmem_f", 33.1, "Retrain in MUSE's table", inclusive=True),
        ConstantGoal("privleak", 0.0, "any over-unlearning passes", reach="above", inclusive=True),
        ConstantGoal("knowmem_r", 27.5, "half of MUSE's Retrain", reach="above", inclusive=True),
    ),
)

_COLUMNS = {
    "verbmem": ("verbmem", "rouge_l_f1"),
    "extraction_strength": ("verbmem", "extraction_strength"),
    "exact_memorization": ("verbmem", "exact_memorization"),
    "knowmem_f": ("knowmem_forget", "rouge_l_f1"),
    "knowmem_r": ("knowmem_retain", "rouge_l_f1"),
}
"""Metric -> (part, column) whose mean it is."""


def muse_metrics(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """Everything that one model's scores say; None where a part is absent."""
    metrics: dict[str, float | None] = {}
    for name, (part, column) in _COLUMNS.items():
        values = scores[part].extra[column] if part in scores else None
        metrics[name] = None if values is None else 100.0 * float(np.mean(values))
    for part in ("forget", "retain"):
        metrics[f"{part}_accuracy"] = scores[part].accuracy if part in scores else None
    auc = _auc(scores)
    metrics["min_k_auc"] = None if auc is None else 100.0 * auc
    return metrics


def _auc(scores: Mapping[str, Any]) -> float | None:
    sets = [scores.get(f"privleak_{name}") for name in ("forget", "holdout")]
    if None in sets:
        return None
    members, others = (part.extra["min_k"] for part in sets if part is not None)
    return membership_auc(members, others)


def muse_compare(
    scores: Mapping[str, Any],
    retrain: Mapping[str, Any],
    *,
    style: MuseStyle = "muse",
    reference: Reference = "retrain",
) -> dict[str, float | None]:
    """PrivLeak of a model.

    Args:
        scores: Its own.
        retrain: The retrained model's, on the same parts.
        style: ``openunlearning`` adds 1e-10 to the denominator.
        reference: Whose AUC it is relative to: the measured ``retrain``, or one of
            :data:`PUBLISHED_AUC`.
    """
    auc = _auc(scores)
    base = _auc(retrain) if reference == "retrain" else 1 - PUBLISHED_AUC[reference]
    if auc is None or base is None:
        return {"privleak": None}
    epsilon = 1e-10 if style == "openunlearning" else 0.0
    return {"privleak": privacy_leakage(auc, base, epsilon=epsilon)}
