"""Items and their token ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stable_forgetting.language.data.corpus import Corpus, Encoded, Item

ITEMS = (
    Item("full", 0, "Who?", "Ada.", "It was Ada.", ("Bob.", "Eve.")),
    Item("world_facts", -1, "Where?", "Paris.", None, ("Rome.",)),
    Item("full", 1, "When?", "1912."),
)


def test_a_digest_changes_with_every_field_and_with_the_order():
    corpus = Corpus(ITEMS, "here")
    assert corpus.digest == Corpus(ITEMS, "elsewhere").digest
    others = [
        Corpus(ITEMS[::-1], "here"),
        Corpus(ITEMS, "here", ("I do not know.",)),
        Corpus((dataclasses.replace(ITEMS[0], perturbed=("Bob.",)), *ITEMS[1:]), "here"),
        Corpus((dataclasses.replace(ITEMS[0], group=2), *ITEMS[1:]), "here"),
    ]
    assert len({corpus.digest, *(other.digest for other in others)}) == 5


def test_sets_are_found_in_order():
    corpus = Corpus(ITEMS, "here")
    assert corpus.where("full").tolist() == [0, 2]
    assert corpus.where("world_facts", "full").tolist() == [0, 1, 2]
    assert corpus.where("holdout").dtype == np.int64 and not len(corpus.where("holdout"))


def test_labels_start_after_the_prompt():
    pair = Encoded(np.array([5, 6, 7, 8]), 3)
    assert pair.labels.tolist() == [8]
    for start in (0, 4):
        with pytest.raises(AssertionError):
            Encoded(np.array([5, 6, 7, 8]), start)
