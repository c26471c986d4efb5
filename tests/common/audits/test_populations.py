from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from stable_forgetting.common.audits.attacks import (
    EpsilonScore,
    ULira,
    attack_epsilon,
    epsilon_credit,
    sample_epsilon,
    shown_epsilon,
    threshold_counts,
    ulira_scores,
)
from stable_forgetting.common.audits.base import NotApplicable
from stable_forgetting.common.audits.populations import KLoM, bin_shares, klom_per_sample
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.data.parts import PARTS, Part, Role

# KLoM


def test_klom_of_a_population_with_itself_is_zero():
    u = np.random.default_rng(0).normal(size=(12, 30))
    assert klom_per_sample(u, u) == pytest.approx(np.zeros(30), abs=1e-15)
    assert klom_per_sample(np.ones((3, 2)), np.ones((5, 2))).tolist() == [0, 0]


def test_klom_by_hand_and_its_order():
    # two bins on [0, 1]: P = (1/2, 1/2), Q = (1, 0): U || R meets the floor, R || U does not
    u, r = np.array([[0.0], [1.0]]), np.array([[0.0], [0.1]])
    forward = 0.5 * math.log(0.5 / 1) + 0.5 * math.log(0.5 / 1e-5)
    assert klom_per_sample(u, r, bins=2)[0] == pytest.approx(forward)
    assert klom_per_sample(r, u, bins=2)[0] == pytest.approx(math.log(1 / 0.5))


def test_bins_are_those_of_numpys_histogram():
    """No sample is dropped: EasyDUB bins with np.digitize and loses the largest."""
    values = np.random.default_rng(1).normal(size=(50, 6))
    low, high = values.min(axis=0), values.max(axis=0)
    ours = bin_shares(values, np.linspace(low, high, 21))
    for k in range(6):
        counts, _ = np.histogram(values[:, k], bins=20, range=(low[k], high[k]))
        assert (ours[:, k] * 50).round().astype(int).tolist() == counts.tolist()


@pytest.fixture
def population(make_scores):
    """Populations of models whose margins are drawn around a shift."""

    def make(count, shift, seed, n=40):
        rng = np.random.default_rng(seed)
        parts = ("forget", "retain", "test")
        return [
            {
                part: make_scores(
                    np.tile([0.6, 0.4], (n, 1)),
                    margin=rng.normal(shift if part == "forget" else 0, 1, n),
                )
                for part in parts
            }
            for _ in range(count)
        ]

    return make


def test_klom_separates_what_differs_and_says_that_models_are_few(population):
    r, second, u = population(8, 0, 1), population(8, 0, 2), population(8, 4, 3)
    found, floor = KLoM().compare(u, r, seed=0), KLoM().compare(second, r, seed=0)
    assert found["forget"].value > found["forget"].low > floor["forget"].high
    assert found["forget p"].value == 0.01 and floor["forget p"].value > 0.05
    assert found["retain p"].value > 0.05
    assert "only 8 models" in found["forget"].note
    assert KLoM().compare(population(16, 0, 4), population(16, 0, 5), seed=0)["test"].note == ""


def test_margins_are_clipped(make_scores):
    def models(value):
        return [{"forget": make_scores(margin=[value + k])} for k in range(2)]

    far, further = models(500.0), models(900.0)
    assert KLoM().compare(far, further, seed=0)["forget"].value == 0
    with pytest.raises(NotApplicable, match="--shadows"):
        KLoM().compare(far[:1], further, seed=0)
    one = [{"forget": make_scores(margin=[0.0], indices=[k])} for k in (1, 2)]
    with pytest.raises(DataError, match="one split"):
        KLoM().compare(one, one, seed=0)


# NeurIPS 2023


def test_epsilon_on_rates_made_by_hand():
    fpr, fnr = np.array([0.1, 0.5, 0.0, 0.0]), np.array([0.2, 0.5, 0.3, 0.0])
    found = attack_epsilon(fpr, fnr, 0.0)
    assert found[0] == pytest.approx(max(math.log(0.9 / 0.2), math.log(0.8 / 0.1)))
    assert found[1] == 0
    assert found[2] == -math.inf  # exactly one rate is 0: skipped
    assert found[3] == math.inf
    # the variant in circulation takes the smaller logarithm
    assert found[0] != pytest.approx(min(math.log(0.9 / 0.2), math.log(0.8 / 0.1)))
    assert attack_epsilon(fpr, fnr, 0.05)[0] == pytest.approx(math.log(0.75 / 0.1))
    credit = epsilon_credit(np.array([0.0, 0.49, 0.5, 1.2, math.inf]), 0.5)
    assert credit.tolist() == [1, 1, 0.5, 0.25, 0], "it halves with each bin"


def test_epsilon_of_samples():
    apart = sample_epsilon(np.array([[1.0], [2.0]]), np.array([[-1.0], [0.0]]), 0.0)
    reverse = sample_epsilon(np.array([[-1.0], [0.0]]), np.array([[1.0], [2.0]]), 0.0)
    assert apart.tolist() == reverse.tolist() == [math.inf]
    # 0 1 2 3 | 0.5 1.5 2.5 3.5: the best cut has FPR 3/4 and FNR 1/4, or both over four
    u, r = np.arange(4.0)[:, None], np.arange(4.0)[:, None] + 0.5
    above, missed = threshold_counts(u, r)
    assert above[:, 0].tolist() == [4, 4, 3, 3, 2, 2, 1, 1, 0]
    assert missed[:, 0].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert sample_epsilon(u, r, 0.0)[0] == pytest.approx(math.log(0.5 / 0.25))


def test_what_is_shown_is_never_more_than_what_was_found_and_grows_with_models():
    rng = np.random.default_rng(0)
    few = shown_epsilon(rng.normal(5, 1, (4, 10)), rng.normal(0, 1, (4, 10)), 0.0)
    many = shown_epsilon(rng.normal(5, 1, (64, 10)), rng.normal(0, 1, (64, 10)), 0.0)
    assert (few < 0.5).all() and (many > 1).all()


def test_the_score_is_quality_times_utility(population):
    r, u = population(8, 0, 1), population(8, 9, 2)
    found = EpsilonScore().compare(u, r, seed=0)
    assert found["F"].value == 0 and found["separated %"].value == 100
    same = EpsilonScore().compare(r, r, seed=0)
    assert same["F"].value == same["score"].value == 1  # equal accuracies: utility is 1
    assert "only 8 models" in found["F"].note


# U-LiRA


def test_utility_takes_the_mean_over_several_held_out_sets(make_scores):
    def model(*shares):
        parts = zip(("retain", "test_a", "test_b"), shares, strict=True)
        return {
            part: replace(make_scores(margin=[0.0] * 4), correct=np.arange(4) < 4 * share)
            for part, share in parts
        }

    ours, theirs = [model(0.5, 0.25, 0.75)], [model(1.0, 0.5, 0.75)]
    audit, held_out = EpsilonScore(), Part(Role.REPORT, utility=True)
    audit.parts = {**PARTS, "test_a": held_out, "test_b": held_out}
    assert audit._utility(ours, theirs) == pytest.approx(0.5 * (0.5 / 0.625))


def test_ulira_scores_by_hand():
    values = np.array([[3.0], [5.0], [4.0], [0.0], [2.0], [1.0]])
    member = np.array([[True]] * 3 + [[False]] * 3)
    found = ulira_scores(values, member, np.array([0, 1, 2, 0, 1, 2]), pooled=False)
    # model 0 without the first pair: N(4.5, 0.5) against N(1.5, 0.5)
    assert found[0, 0] == pytest.approx(-((3 - 4.5) ** 2) + (3 - 1.5) ** 2)
    assert found[1, 0] == pytest.approx(-((5 - 3.5) ** 2) + (5 - 0.5) ** 2)


def test_constant_margins_stay_finite():
    # Deep Unlearn attacks 0/1 correctness: a deviation of 0 gave NaN there
    values = np.array([[1.0], [1.0], [1.0], [0.0], [0.0], [0.0]])
    member = np.array([[True]] * 3 + [[False]] * 3)
    found = ulira_scores(values, member, np.array([0, 1, 2, 0, 1, 2]), pooled=False)
    assert np.isfinite(found).all() and (found[:3] > 0).all() and (found[3:] < 0).all()


def test_exchangeable_sides_score_chance(population):
    # leaving out the attacked model alone would push this well below 50
    found = [
        ULira().compare(population(4, 0, 2 * k), population(4, 0, 2 * k + 1), seed=0)["b.acc"].value
        for k in range(12)
    ]
    assert abs(np.mean(found) - 50) < 3


def test_ulira_finds_what_differs(population):
    found = ULira().compare(population(16, 3, 1), population(16, 0, 2), seed=0)
    assert found["b.acc"].low > 80 and found["AUC"].value > 95
    assert found["acc > 60 %"].value == 100
    assert found["TPR@1%"].value > 50 and "needs 1000" in found["TPR@0.1%"].note
    assert found["TPR@0.1%"].value is None and found["b.acc"].note == ""


def test_halves_put_every_sample_on_both_sides(make_scores):
    rng = np.random.default_rng(0)
    models = []
    for k in range(8):
        order = np.random.default_rng(k // 2).permutation(20)
        sides = [np.sort(order[:10]), np.sort(order[10:])]
        inside, outside = sides[:: -1 if k % 2 else 1]
        models.append(
            {
                "forget": make_scores(margin=rng.normal(4, 1, 10), indices=inside),
                "forget_out": make_scores(margin=rng.normal(0, 1, 10), indices=outside),
            }
        )
    found = ULira().halves(models, seed=0)
    assert found["b.acc"].value > 90 and "only 4 models per side" in found["b.acc"].note
    with pytest.raises(NotApplicable, match="6 or more halves"):
        ULira().halves(models[:2], seed=0)
    odd = ULira().halves([*models[:3], *models[4:]], seed=0)
    assert odd == ULira().halves([*models[:2], *models[4:]], seed=0), "model 2 has no complement"
    few = [{**each, "forget": each["forget"].select(np.arange(6))} for each in models]
    with pytest.raises(NotApplicable, match="different samples"):
        ULira().halves(few, seed=0)
