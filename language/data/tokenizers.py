"""Tokenizers: a folder or hub id, or a small byte-level BPE trained on the corpus itself.

A tiny model spends most of its time and parameters on a large vocabulary (with GPT-2's 50,257
entries 85 % of a training step), so small runs train their own.  The same text gives the same
tokenizer.  It sees the forgotten text too, as does the tokenizer of Retrain: both models must
share one vocabulary for their losses to be comparable.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stable_forgetting.common.base.errors import ConfigError, DataError, one_line
from stable_forgetting.common.base.hub import prepare_client
from stable_forgetting.common.store.adapters import base_of, is_adapter
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Encoded
from stable_forgetting.language.data.templates import Template

logger = logging.getLogger(__name__)

END = "<|endoftext|>"


def load_tokenizer(
    config: CausalModelConfig, corpus: Corpus | None = None, *, data_root: Path | None = None
) -> Any:
    """The tokenizer of a model: a fast tokenizer with an end-of-sequence token.

    Args:
        corpus: The text to train on, where one is trained.
        data_root: A tokenizer folder may be given relative to it, such as ``tokenizers/gpt2``.

    Raises:
        DataError: It cannot be fetched or read.
        ConfigError: It has no end-of-sequence token, or is not a fast tokenizer.
    """
    if isinstance(config.tokenizer, int):
        assert corpus is not None, "a tokenizer is trained on a corpus"
        return train_tokenizer(corpus, config.tokenizer)
    name = config.tokenizer or config.name
    if data_root is not None and (data_root / name / "tokenizer_config.json").is_file():
        name = str(data_root / name)
    if is_adapter(name) and not (Path(name) / "tokenizer_config.json").is_file():
        name = base_of(Path(name))
    return check_tokenizer(
        _fetch(name, config.revision if config.tokenizer is None else None), name
    )


def check_tokenizer(tokenizer: Any, name: str) -> Any:
    """The tokenizer itself; ``name`` stands in messages.

    Raises:
        ConfigError: It has no end-of-sequence token, or is not a fast tokenizer.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"tokenizer {name}: has no end-of-sequence token; choose another")
    if not tokenizer.is_fast:
        raise ConfigError(f"tokenizer {name}: needs a tokenizer.json; choose another")
    return tokenizer


def _fetch(name: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    prepare_client()
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision, use_fast=True, trust_remote_code=False
        )
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise DataError(
            f"tokenizer {name}: cannot be read ({one_line(error)}); download it and give"
            " model.name: FOLDER (for the tokenizer alone model.tokenizer: FOLDER, or a number to"
            " train one), or run once on a machine with a network"
        ) from None


def texts(corpus: Corpus) -> Iterator[str]:
    """Everything that is ever tokenised, as it stands in a sequence: pairs, then other wordings."""
    for item in corpus.items:
        yield f"Question: {item.question}\nAnswer: {item.answer}" if item.question else item.answer
        for text in (item.paraphrase, *item.perturbed, item.paraphrased_question):
            if text:
                yield f" {text}"
    yield from (f" {line}" for line in corpus.refusals)


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Any:
    """A byte-level BPE with at most ``vocab_size`` entries; its only special token is the end.

    Returns:
        A ``PreTrainedTokenizerFast`` with ``eos_token`` (id 0) and no other special token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(corpus), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


def check_template(tokenizer: Any, template: Template) -> None:
    """Raises :class:`ConfigError` where the tokenizer lacks a token that the template spells."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in template.required_tokens if token not in vocabulary]
    if missing:
        raise ConfigError(
            f"template {template.family}: the tokenizer has no token {missing[0]}; choose"
            " model.template: question_answer, or the tokenizer of that model"
        )


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of the tokenizer's rules and vocabulary and of its special tokens."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    rules = tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(f"{special}\n{rules}".encode()).hexdigest()


class Encoder:
    """(question, answer) -> token ids, with a memory.

    Args:
        tokenizer: A fast tokenizer with an end-of-sequence token.
        template: Prompt format and style.
        max_length: Longest sequence in tokens; longer ones are cut at the end, as in the published
            code, and counted in ``truncated``.

    Attributes:
        calls: How many texts were tokenised.
        truncated: How many pairs were cut.
        cut: Which of them.
        window: Tokens that the model reads, as far as it is known: a longer pair is refused.
        given: Plain text -> its ids, where it is a slice of a longer one's tokens.
    """

    def __init__(self, tokenizer: Any, template: Template, max_length: int):
        check_template(tokenizer, template)
        self.tokenizer = tokenizer
        self.template = template
        self.max_length, self.window = max_length, sys.maxsize
        self.end = tokenizer.eos_token_id
        if template.end is not None:
            self.end = tokenizer.convert_tokens_to_ids(template.end)
        self.calls = 0
        self.truncated = 0
        self.cut: set[tuple[str, str]] = set()
        self._prompts: dict[str, list[int]] = {}
        self._answers: dict[str, list[int]] = {}
        self._pairs: dict[tuple[str, str], Encoded] = {}
        self._anchors: dict[str, list[int]] = {}
        self._ready: dict[tuple[str, bool], list[int]] = {}
        self.given: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Ids of a whole text behind the tokenizer's start token; nothing is cut."""
        return self._tokens(text, special=self._marks_texts)

    def room_after(self, prompt: int, most: int) -> int:
        """Tokens that may be written after one of so many: ``most``, or what the window leaves."""
        return min(most, max(1, self.window - prompt))

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
        ids = self._ready.pop((text, special), None)
        if ids is None:
            ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids[: len(ids) - self._closing] if special else ids

    def prepare(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Tokenises together what :meth:`encode` will need for these questions and answers."""
        template, texts = self.template, dict[tuple[str, bool], None]()
        alone = template.style == "clean" or template.special
        for question, answer in pairs:
            if not question or (question, answer) in self._pairs:
                continue
            prompt = template.prompt(question)
            if question not in self._prompts:
                texts[prompt, not template.special] = None
            if not alone:
                texts[prompt + template.lead + answer, True] = None
            elif answer not in self._answers:
                texts[template.after[-1] + template.lead + answer, False] = None
        for special in (True, False):
            group = [text for text, own in texts if own == special]
            if group:
                made = self.tokenizer(group, add_special_tokens=special, verbose=False)
                keys = ((text, special) for text in group)
                self._ready |= zip(keys, made["input_ids"], strict=True)

    @cached_property
    def _closing(self) -> int:
        """Special tokens that the tokenizer puts behind a text, where a prompt may not end."""
        made = self.tokenizer("a", return_special_tokens_mask=True, verbose=False)
        added = made["special_tokens_mask"][::-1]
        return added.index(0) if 0 in added else 0

    @property
    def _marks(self) -> int:
        """Special tokens that stand before a plain text."""
        added = int(self.tokenizer.num_special_tokens_to_add()) - self._closing
        return added if self._marks_texts else 0

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
            before = self.truncated
            ids, start = self._encode(question, answer)
            if self.truncated > before:
                self.cut.add(key)
            if not 1 <= start < len(ids):
                raise DataError(
                    f"'{(question or answer)[:60]}': no label is left within data.max_length"
                    f" {self.max_length}; raise it or shorten the text"
                )
            self._pairs[key] = Encoded(np.asarray(ids, dtype=np.int64), start)
        length = len(self._pairs[key].ids)
        if length > self.window:
            raise DataError(
                f"'{(question or answer)[:60]}': {length} tokens are more than model.context"
                f" {self.window}; raise it, or set data.max_length={self.window}"
            )
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
