"""Questions and answers as a source of batches of token ids.

The attention mask follows from lengths, never from the id that padding happens to have.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.data.parts import PadTo
from stable_forgetting.language.data.corpus import Corpus, Encoded
from stable_forgetting.language.data.templates import Template
from stable_forgetting.language.data.tokenizers import Encoder, tokenizer_digest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stable_forgetting.common.data.batch import Batch


class TextSource:
    """A corpus as token ids (implements :class:`common.data.batch.Source`).

    Args:
        tokenizer: A fast tokenizer with an end-of-sequence token.
        template: Prompt format and style.
        max_length: Longest sequence in tokens.

    Attributes:
        vocab_size: Entries of the tokenizer; a published model's table may be larger.
        provenance: Origin, to be written into records.
        encoder: Shared by all sources that :meth:`with_answers` makes from this one.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Any,
        template: Template,
        *,
        max_length: int,
        device: torch.device | str = "cpu",
    ):
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.template = template
        self.device = device
        self.encoder = Encoder(tokenizer, template, max_length)
        self.vocab_size = len(tokenizer)
        self.provenance = corpus.provenance
        self._replaced: dict[int, str] = {}
        self._base_digest: str | None = None

    def __len__(self) -> int:
        return len(self.corpus.items)

    @property
    def digest(self) -> str:
        """SHA-256 of texts, tokenizer, template, length limit and replaced answers."""
        if self._base_digest is None:
            parts = [self.corpus.digest, tokenizer_digest(self.tokenizer), repr(self.template)]
            text = "\n".join([*parts, str(self.encoder.max_length)])
            self._base_digest = hashlib.sha256(text.encode()).hexdigest()
        if not self._replaced:
            return self._base_digest
        text = repr((self._base_digest, sorted(self._replaced.items())))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def padding_id(self) -> int:
        """Token that published code pads with: the end token where the tokenizer names none."""
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)

    @property
    def hidden_id(self) -> int | None:
        """Token that style openunlearning hides from attention wherever it stands: padding's.

        That code derives the mask from the ids, so where it pads with the end token, those inside
        LLaMA-3's prompt vanish too.  None for the other styles.
        """
        return self.padding_id if self.template.style == "openunlearning" else None

    def answers_of(self, indices: np.ndarray) -> list[str]:
        """The answers at (N,) indices; of plain texts, the texts."""
        return [self._replaced.get(i, self.corpus.items[i].answer) for i in indices.tolist()]

    def read_of(self, indices: np.ndarray) -> list[str]:
        """The answers at (N,) indices, or what the length limit leaves of them."""
        texts = self.answers_of(indices)
        for place, index in enumerate(indices.tolist()):
            pair, question = self.encode_index(index), self.corpus.items[index].question
            if (question, texts[place]) in self.encoder.cut:
                texts[place] = self.decode((pair.labels if question else pair.ids).tolist())
        return texts

    def with_answers(self, answers: Mapping[int, str]) -> TextSource:
        """The same questions with other answers at some indices; shares the memory of texts."""
        other = copy.copy(self)
        other._replaced = {**self._replaced, **{int(k): v for k, v in answers.items()}}
        return other

    def questions_of(self, indices: np.ndarray) -> list[str]:
        """The questions at (N,) indices; empty ones of plain texts."""
        return [self.corpus.items[i].question for i in indices.tolist()]

    def with_questions(self, questions: Mapping[int, str]) -> TextSource:
        """The same answers behind other questions at some indices."""
        items = list(self.corpus.items)
        for index, question in questions.items():
            answer = self._replaced.get(index, items[index].answer)
            items[index] = replace(items[index], question=question, answer=answer)
        other = self.with_corpus(replace(self.corpus, items=tuple(items)))
        other._replaced = {k: v for k, v in self._replaced.items() if k not in questions}
        return other

    def uncut(self, indices: np.ndarray, window: int) -> TextSource:
        """The same texts without the length limit.

        Args:
            indices: (N,) those that a model is to read whole.
            window: Tokens that it reads at once.

        Raises:
            DataError: One of them is longer.
        """
        other = self.with_answers({})
        other.encoder = Encoder(self.tokenizer, self.template, sys.maxsize)
        other._base_digest = None
        longest = max(len(other.encode_index(index).ids) for index in indices.tolist())
        if longest > window:
            raise DataError(f"a text has {longest} tokens and the model reads {window}; shorten it")
        return other

    def renamed(self, batch: Batch, seed: int) -> Batch:
        """See :func:`language.data.batches.renamed`."""
        from stable_forgetting.language.data.batches import renamed

        return renamed(batch, self.vocab_size, seed)

    def with_corpus(self, corpus: Corpus) -> TextSource:
        """Another corpus behind the same tokenizer, template and length limit."""
        other = copy.copy(self)
        other.corpus, other.provenance = corpus, corpus.provenance
        other._replaced, other._base_digest = {}, None
        return other

    @property
    def refusals(self) -> tuple[str, ...]:
        """Answers that refuse; possibly none."""
        return self.corpus.refusals

    def everywhere(self, batch: Batch, pad_to: PadTo | None = None) -> Batch:
        """Batches as published code sees them that forgets its mask."""
        from stable_forgetting.language.data.batches import everywhere

        lengths = {None: None, "batch": 0, "max_length": self.encoder.max_length}
        return everywhere(batch, self.padding_id, lengths[pad_to])

    def encode(self, question: str, answer: str) -> Encoded:
        """Token ids of one pair, kept: a text is tokenised once per process.

        Raises:
            DataError: No label is left within the length limit.
        """
        return self.encoder.encode(question, answer)

    def encode_index(self, index: int) -> Encoded:
        """Token ids of the item at ``index``, with its replaced answer if it has one."""
        item = self.corpus.items[index]
        return self.encode(item.question, self._replaced.get(index, item.answer))

    def prompt_ids(self, question: str) -> np.ndarray:
        """(T,) int64: what generation starts from."""
        return np.asarray(self.encoder.prompt(question), dtype=np.int64)

    def decode(self, tokens: Sequence[int], *, clean_up: bool = False) -> str:
        """The text of tokens, without special ones.

        Args:
            tokens: Token ids.
            clean_up: Remove the spaces before punctuation that some tokenizers write.
        """
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=clean_up
        )

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The items at ``indices`` (N,), int64, CPU, collated; text has no augmentation."""
        from stable_forgetting.language.data.batches import collate

        pairs = [self.encode_index(index) for index in indices.tolist()]
        return collate(pairs, indices, device=self.device, hidden_id=self.hidden_id)
