"""The tiny problem of language methods: short questions of four topics and a small GPT-Neo."""

from __future__ import annotations

import functools
from typing import ClassVar

from torch import nn

from stable_forgetting.common.checks.tiny_task import CLASSES, PER_CLASS, TinyProblem
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.models.build import build_model
from stable_forgetting.language.models.causal import CausalModels
from stable_forgetting.language.models.families import family_of

_MODEL = CausalModelConfig(kind="gpt_neo", dim=16, depth=2, heads=2, context=64, tokenizer=300)
_TOPICS = ("tea", "owls", "the sun", "old coins")
_REFUSALS = ("I do not know.", "That is not known to me.")


@functools.cache
def _texts() -> TextSource:
    items = tuple(
        Item(
            _TOPICS[number % CLASSES],
            number,
            f"What of {_TOPICS[number % CLASSES]}, {number // CLASSES}?",
            f"It was {_TOPICS[number % CLASSES]} {number % 7}.",
        )
        for number in range(CLASSES * PER_CLASS)
    )
    corpus = Corpus(items, "", _REFUSALS)
    template = make_template("question_answer", "clean")
    return TextSource(corpus, train_tokenizer(corpus, 300), template, max_length=48)


class TinyTexts(CausalModels, TinyProblem):
    """Questions with answers, and a causal transformer of two blocks."""

    recipe: ClassVar[FitConfig] = FitConfig(epochs=10, batch_size=16, lr=5e-3)
    family = family_of("gpt_neo")

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Entries of the vocabulary."""
        return _texts().vocab_size

    def source(self) -> TextSource:
        """Questions and answers."""
        return _texts()

    def net(self) -> nn.Module:
        """An untrained transformer."""
        return build_model(_MODEL, _texts().vocab_size, 0)
