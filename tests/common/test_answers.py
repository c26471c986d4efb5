"""Distances between the answers of two models, sample by sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stable_forgetting.common.measure.answers import answer_distances
from stable_forgetting.common.measure.scores import Scores


def scores(probs: list[list[float]] | None, indices=(4, 7)) -> Scores:
    zeros = np.zeros(len(indices), np.float32)
    arrays = dict.fromkeys(
        ("loss", "probability", "margin", "entropy", "modified_entropy", "correct"), zeros
    )
    softmax = None if probs is None else np.array(probs, np.float32)
    return Scores(indices=np.array(indices), probs=softmax, **arrays)


def test_equal_answers_are_at_zero_and_opposite_ones_at_ln_2():
    same, other = scores([[1, 0], [0, 1]]), scores([[0, 1], [1, 0]])
    assert answer_distances({"a": same}, {"a": same}, ["a"]) == {"js_a": 0, "changed_a": 0}
    apart = answer_distances({"a": same}, {"a": other}, ["a"])
    assert apart == {"js_a": pytest.approx(math.log(2)), "changed_a": 100}


def test_means_are_over_samples_and_changes_are_of_classes():
    one, two = scores([[0.9, 0.1], [0.6, 0.4]]), scores([[0.8, 0.2], [0.4, 0.6]])
    made = answer_distances({"a": one}, {"a": two}, ["a"])
    by_hand = 0.0
    for p, q in (([0.9, 0.1], [0.8, 0.2]), ([0.6, 0.4], [0.4, 0.6])):
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        for side in (p, q):
            by_hand += sum(a * math.log(a / b) for a, b in zip(side, m, strict=True)) / 4
    assert made["js_a"] == pytest.approx(by_hand) and made["changed_a"] == 50


@pytest.mark.parametrize(
    "other", [{}, {"a": scores(None)}, {"a": scores([[1, 0], [0, 1]], indices=(4, 8))}]
)
def test_what_cannot_be_compared_is_unknown(other):
    own = {"a": scores([[1, 0], [0, 1]])}
    assert answer_distances(own, other, ["a"]) == {"js_a": None, "changed_a": None}
