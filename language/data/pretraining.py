"""Texts to pretrain on: which are held out, and how they are told from a suite's own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from pydantic import SerializeAsAny

from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.splits import PretrainingSplit
from stable_forgetting.common.protocol.pretraining import Pretraining
from stable_forgetting.common.store.packages import PACKAGE
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import TextDataConfig

HELD_OUT = 20
"""One text in so many is not trained on."""
RUN = 8
"""Words in a row: TOFU has none in common with encyclopaedias, novels and pages of the Pile."""


class TextPretraining(Pretraining):
    """A pretraining on other texts, of which one in 20 measures it.

    Attributes:
        data: Which texts.  A tokenizer that is trained is trained on these alone.
    """

    data: SerializeAsAny[TextDataConfig]


def check_start(other: TextDataConfig, own: TextDataConfig, model: CausalModelConfig) -> None:
    """Refuses texts of a pretraining that do not fit a protocol's own texts and model.

    Raises:
        ValueError: They are the protocol's own, its models are published or a package's, or their
            pieces are longer than the model's window.
    """
    if model.original or model.retrain:
        raise ValueError("give one of pretrain and model.original (or model.retrain)")
    if model.name.startswith(PACKAGE):  # its vocabulary is cut down to one text
        raise ValueError(f"{model.name} is pretrained, and no other text fits; leave pretrain out")
    if own == other or _paths(own) & _paths(other):
        raise ValueError(
            f"pretrain.data: {own.name} is what the suite learns and forgets; pretrain on other "
            "texts"
        )
    if model.context is not None and other.max_length > model.context:
        raise ValueError(
            f"pretrain.data.max_length: {other.max_length} tokens are more than model.context "
            f"{model.context}; lower it"
        )


def _paths(data: Any) -> set[str]:
    return set((getattr(data, "files", None) or {}).values())


def held_out_split(corpus: Corpus, name: str, digest: str) -> PretrainingSplit:
    """All pieces of most texts, and all pieces of one text in :data:`HELD_OUT`.

    Pieces of one text have its number as their group.
    """
    items = enumerate(corpus.items)
    texts = [(item.set, item.group, -1 if item.group >= 0 else n) for n, item in items]
    names = sorted(set(texts))
    order = hash_order(range(len(names)), 0, "pretrain", "held out")
    aside = {names[k] for k in order[: max(1, len(names) // HELD_OUT)]}
    held_out = np.array([text in aside for text in texts])
    parts = {"train": np.flatnonzero(~held_out), "test": np.flatnonzero(held_out)}
    return PretrainingSplit(f"{name}/pretrain", parts, digest)


def fingerprints(items: Iterable[Item]) -> np.ndarray:
    """(M,) int64 hashes of every run of words of the items, each question before its answer."""
    runs = {run for item in items for run in word_runs(f"{item.question} {item.answer}")}
    return np.array(sorted(runs), dtype=np.int64)


def word_runs(text: str) -> set[int]:
    """64-bit hashes of every run of :data:`RUN` words of a text, without case and punctuation.

    A text of fewer words has none: it may stand in any other by chance.
    """
    words = re.findall(r"\w+", text.lower())
    runs = (" ".join(words[i : i + RUN]) for i in range(len(words) - RUN + 1))
    digests = (hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs)
    return {int.from_bytes(digest, "little", signed=True) for digest in digests}
