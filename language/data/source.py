"""Questions and answers as a source of batches of token ids.

Every text is tokenised once per process: prompts and answers are encoded apart where the style
allows it, kept, and joined.  The attention mask follows from lengths, never from the id that
padding happens to have.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.data.batch import IGNORE, Batch, to_device
from stable_forgetting.common.data.padding import PadTo
from stable_forgetting.language.data.corpus import Corpus, Encoded
from stable_forgetting.language.data.templates import Template
from stable_forgetting.language.data.tokenizers import check_template, tokenizer_digest
from stable_forgetting.language.data.unmasked import everywhere

logger = logging.getLogger(__name__)


class Encoder:
    """(question, answer) -> token ids, with a memory.

    Args:
        tokenizer: A fast tokenizer with an end-of-sequence token.
        template: Prompt format and style.
        max_length: Longest sequence in tokens; longer ones are cut at the end, as in the published
            code, and counted in ``truncated``.

    Attributes:
        calls: How often the tokenizer was called.
        truncated: How many pairs were cut.
        given: Plain text -> its ids, where it is a slice of a longer one's tokens.
    """

    def __init__(self, tokenizer: Any, template: Template, max_length: int):
        check_template(tokenizer, template)
        self.tokenizer = tokenizer
        self.template = template
        self.max_length = max_length
        self.end = tokenizer.eos_token_id
        if template.end is not None:
            self.end = tokenizer.convert_tokens_to_ids(template.end)
        self.calls = 0
        self.truncated = 0
        self._prompts: dict[str, list[int]] = {}
        self._answers: dict[str, list[int]] = {}
        self._pairs: dict[tuple[str, str], Encoded] = {}
        self._anchors: dict[str, list[int]] = {}
        self.given: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Ids of a whole text with the tokenizer's special tokens; nothing is cut."""
        return self._tokens(text, special=self._marks_texts)

    def beginning(self, ids: list[int], room: int, limit: str = "the model's window") -> list[int]:
        """The first ``room`` tokens, which ``limit`` leaves."""
        if len(ids) <= room:
            return ids
        self._note_cut(f"{limit} {room}", "ends")
        return ids[:room]

    def ending(self, ids: list[int], room: int) -> list[int]:
        """The last ``room`` tokens of a prompt, the tokenizer's start token among them."""
        if len(ids) <= room:
            return ids
        self._note_cut(f"the model's window {room}", "beginnings")
        start = ids[: min(self._marks, 1)]
        return start + ids[len(ids) - room + len(start) :]

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        self.calls += 1
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]

    @property
    def _marks(self) -> int:
        """Special tokens that the tokenizer puts around a plain text."""
        return int(self.tokenizer.num_special_tokens_to_add()) if self._marks_texts else 0

    @property
    def _marks_texts(self) -> bool:
        return self.template.marked_texts or not self.template.special

    @property
    def room(self) -> int:
        """Tokens of the longest plain text, without special ones."""
        return self.max_length - self._marks

    @property
    def least(self) -> int:
        """Tokens of the shortest plain text, without special ones: one is predicted."""
        return max(1, 2 - self._marks)

    def token_starts(self, text: str) -> list[int]:
        """The character at which each token of a text begins, special tokens left out."""
        return self.located(text)[1]

    def located(self, text: str) -> tuple[list[int], list[int]]:
        """(ids, the character at which each token begins), special tokens left out."""
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        made = self.tokenizer(text, verbose=False, **options)
        return made["input_ids"], [start for start, _ in made["offset_mapping"]]

    def prompt(self, question: str) -> list[int]:
        """Ids of the generation prompt, with the tokenizer's start token where it has one."""
        if question not in self._prompts:
            own = not self.template.special
            ids = self._tokens(self.template.prompt(question), special=own)
            self._prompts[question] = ids
        return self._prompts[question]

    def answer(self, answer: str) -> list[int]:
        """Ids of an answer as the text that follows a prompt, without an end token.

        The tail of the prompt is tokenised along and taken off again: a tokenizer that writes its
        own space before a text (LLaMA-2's) would else double it.
        """
        if answer not in self._answers:
            self._answers[answer] = self.continuation(self.template.lead + answer)
        return self._answers[answer]

    def continuation(self, text: str) -> list[int]:
        """Ids of a text that follows another one, without special tokens."""
        for tail in (self.template.after[-1], "\n"):  # a tail may merge with what follows it
            if tail not in self._anchors:
                self._anchors[tail] = self._tokens(tail)
            anchor = self._anchors[tail]
            ids = self._tokens(tail + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self._tokens(text)

    def encode(self, question: str, answer: str) -> Encoded:
        """Prompt and answer; a plain text (empty question) is predicted from its second token."""
        key = (question, answer)
        if key not in self._pairs:
            ids, start = self._encode(question, answer)
            if not 1 <= start < len(ids):
                raise DataError(
                    f"'{(question or answer)[:60]}': no label is left within data.max_length"
                    f" {self.max_length}; raise it or shorten the text"
                )
            self._pairs[key] = Encoded(np.asarray(ids, dtype=np.int64), start)
        return self._pairs[key]

    def _encode(self, question: str, answer: str) -> tuple[list[int], int]:
        if not question:
            given = self.given.get(answer)
            return self._cut(self.text(answer)) if given is None else given, 1
        if self.template.style == "clean" or self.template.special:
            prompt = self.prompt(question)
            ids = [*prompt, *self.answer(answer), self.end]
            uncut = self.template.style == "openunlearning"  # its chat branch does not cut
            return (ids if uncut else self._cut(ids)), len(prompt)
        prompt = self.prompt(question)
        text = self.template.prompt(question) + self.template.lead + answer
        whole = self._tokens(text, special=True)
        ids = self._cut(whole)
        if self.template.style == "tofu":
            return (ids if len(whole) >= self.max_length else [*ids, self.end]), len(prompt)
        start = min(len(prompt), self.max_length)
        return (ids if ids[-1] == self.end else [*ids, self.end]), start

    def _cut(self, ids: list[int]) -> list[int]:
        return self.beginning(ids, self.max_length, "data.max_length")

    def _note_cut(self, limit: str, what: str) -> None:
        self.truncated += 1
        if self.truncated & (self.truncated - 1) == 0:  # 1, 2, 4, 8, ..: seen, but not a flood
            cut = "%d text(s) so far are longer than %s tokens; their %s are cut"
            logger.warning(cut, self.truncated, limit, what)


class TextSource:
    """A corpus as token ids (implements :class:`common.data.batch.Source`).

    Args:
        corpus: Questions and answers.
        tokenizer: A fast tokenizer with an end-of-sequence token.
        template: Prompt format and style.
        max_length: Longest sequence in tokens.
        device: Where batches are made.

    Attributes:
        corpus: What was given.
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
        self.device = torch.device(device)
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
    def hidden_id(self) -> int | None:
        """Token that style openunlearning hides from attention wherever it stands: the end token.

        That code pads with it and then derives the mask from the ids, so the end tokens inside
        LLaMA-3's prompt vanish too.  None for the other styles.
        """
        return self.encoder.end if self.template.style == "openunlearning" else None

    def answers_of(self, indices: np.ndarray) -> list[str]:
        """The answers at (N,) indices; of plain texts, the texts."""
        return [self._replaced.get(i, self.corpus.items[i].answer) for i in indices.tolist()]

    def with_answers(self, answers: Mapping[int, str]) -> TextSource:
        """The same questions with other answers at some indices; shares the memory of texts."""
        other = TextSource.__new__(TextSource)
        other.__dict__.update(self.__dict__)
        other._replaced = {**self._replaced, **{int(k): v for k, v in answers.items()}}
        return other

    def with_corpus(self, corpus: Corpus) -> TextSource:
        """Another corpus behind the same tokenizer, template and length limit."""
        other = TextSource.__new__(TextSource)
        other.__dict__.update(self.__dict__)
        other.corpus, other.provenance = corpus, corpus.provenance
        other._replaced, other._base_digest = {}, None
        return other

    @property
    def refusals(self) -> tuple[str, ...]:
        """Answers that refuse; possibly none."""
        return self.corpus.refusals

    def everywhere(self, batch: Batch, pad_to: PadTo | None = None) -> Batch:
        """See :func:`language.data.unmasked.everywhere`."""
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        lengths = {None: None, "batch": 0, "max_length": self.encoder.max_length}
        return everywhere(batch, pad, lengths[pad_to])

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
        """The items at ``indices`` (N,), int64, CPU; text has no augmentation.

        Returns:
            See :func:`collate`.
        """
        pairs = [self.encode_index(index) for index in indices.tolist()]
        return collate(pairs, indices, device=self.device, hidden_id=self.hidden_id)


def collate(
    pairs: Sequence[Encoded],
    indices: Tensor,
    *,
    device: torch.device | str = "cpu",
    hidden_id: int | None = None,
) -> Batch:
    """Right-padded batch of N pairs; L is the longest sequence, A the most labels.

    Args:
        pairs: Token ids.
        indices: (N,) int64, where the pairs sit in their source.
        device: Of the batch.
        hidden_id: Leave this token out of the attention mask (:attr:`TextSource.hidden_id`).

    Returns:
        Inputs ``input_ids`` (N, L) padded with 0, ``attention_mask`` (N, L) and ``positions``
        (N, A): where the hidden state that predicts each label sits, 0 where padded.  Labels
        (N, A), -100 where padded.  All int64.
    """
    length = max(len(pair.ids) for pair in pairs)
    width = max(len(pair.ids) - pair.start for pair in pairs)
    ids, mask = (np.zeros((len(pairs), length), dtype=np.int64) for _ in range(2))
    positions = np.zeros((len(pairs), width), dtype=np.int64)
    labels = np.full((len(pairs), width), IGNORE, dtype=np.int64)
    for row, pair in enumerate(pairs):
        total, count = len(pair.ids), len(pair.ids) - pair.start
        ids[row, :total] = pair.ids
        mask[row, :total] = 1 if hidden_id is None else pair.ids != hidden_id
        positions[row, :count] = np.arange(pair.start - 1, total - 1)
        labels[row, :count] = pair.labels
    inputs = {"input_ids": ids, "attention_mask": mask, "positions": positions}
    moved = {n: to_device(torch.from_numpy(a), device) for n, a in {**inputs, "": labels}.items()}
    return Batch({n: moved[n] for n in inputs}, moved[""], indices)
