"""Tokenizers: a folder or hub id, or a small byte-level BPE trained on the corpus itself.

A tiny model spends most of its time and parameters on a large vocabulary (with GPT-2's 50,257
entries 85 % of a training step), so small runs train their own.  The same text gives the same
tokenizer.  It sees the forgotten text too, as does the tokenizer of Retrain: both models must
share one vocabulary for their losses to be comparable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.errors import ConfigError, DataError, one_line
from stable_forgetting.common.base.hub import prepare_client
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus
from stable_forgetting.language.data.templates import Template

END = "<|endoftext|>"


def load_tokenizer(
    config: CausalModelConfig, corpus: Corpus | None = None, *, data_root: Path | None = None
) -> Any:
    """The tokenizer of a model: a fast tokenizer with an end-of-sequence token.

    Args:
        config: Names it, or gives the size of one to train.
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
    return check_tokenizer(
        _fetch(name, config.revision if config.tokenizer is None else None), name
    )


def check_tokenizer(tokenizer: Any, name: str) -> Any:
    """The tokenizer itself.

    Args:
        tokenizer: Of transformers.
        name: For messages.

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
