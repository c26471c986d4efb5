from __future__ import annotations

import math

import numpy as np
import pytest

from stable_forgetting.common.audits import pairs
from stable_forgetting.common.audits.base import NotApplicable, wanted_parts
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.data.parts import PARTS, Part, Role, utility_parts
from stable_forgetting.common.measure.scores import auc


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.fixture
def noise(make_scores):
    """Two models with the same distribution of outputs, and a third that is surer."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(400, 4))
    labels = rng.integers(0, 4, 400)
    one, two = (softmax(shared + rng.normal(size=(400, 4))) for _ in range(2))
    third = softmax(3 * (shared + rng.normal(size=(400, 4))))
    return tuple({"test": make_scores(p, labels)} for p in (one, two, third))


def test_js_of_bernoullis_by_hand():
    p, q = np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    by_hand = 0.5 * (math.log(0.5 / 0.75) * 0.5 + math.log(0.5 / 0.25) * 0.5) + 0.5 * math.log(
        1 / 0.75
    )
    assert pairs.js_rows(p, q) == pytest.approx([by_hand, math.log(2)])
    assert pairs.js_rows(p, p) == pytest.approx([0, 0], abs=1e-15)
    assert pairs.js_rows(p, q) == pytest.approx(pairs.js_rows(q, p))


def test_kl_is_a_sum_over_classes_and_not_a_mean():
    # F.kl_div's default reduction in the Bad-Teacher and SSD repositories divides by C as well
    p, q = np.array([[0.7, 0.2, 0.1]]), np.array([[0.2, 0.3, 0.5]])
    expected = 0.7 * math.log(0.7 / 0.2) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.5)
    assert pairs.kl_rows(p, q)[0] == pytest.approx(expected)


def test_js_is_given_for_every_scored_part_with_its_interval(make_scores):
    u = {part: make_scores(np.full((40, 2), 0.5)) for part in ("forget", "test", "validation")}
    r = {part: make_scores(np.tile([0.9, 0.1], (40, 1))) for part in ("forget", "test")}
    measures = pairs.JensenShannon().compare(u, r, seed=1)
    assert list(measures) == ["forget", "test"]
    assert measures["forget"].low == measures["forget"].value == measures["forget"].high > 0


def test_disagreement_counts_predictions(make_scores):
    ours, theirs = np.eye(3)[[0, 1, 2, 2]], np.eye(3)[[0, 1, 1, 0]]
    found = pairs.Disagreement().compare(
        {"test": make_scores(ours)}, {"test": make_scores(theirs)}, seed=0
    )["test"]
    assert found.value == 50 and found.low < 50 < found.high


def test_ks_by_hand_with_its_band(make_scores):
    u = {"forget": make_scores(margin=[0.0, 1.0, 2.0, 3.0])}
    r = {"forget": make_scores(margin=[2.5, 3.5, 4.5, 5.5])}
    found = pairs.KolmogorovSmirnov().compare(u, r, seed=0)
    assert found["forget"].value == 0.75
    assert found["forget"].low == 0 and found["forget"].high == 1  # four samples tell nothing
    assert found["forget log10 p"].value == pytest.approx(math.log10(16 / 70))
    assert "only 4" in found["forget"].note


def test_c2st_of_equal_models_includes_chance_and_of_different_ones_does_not(noise):
    one, two, third = noise
    equal = pairs.ClassifierTwoSample().compare(one, two, seed=1)["test"]
    assert equal.low < 50 < equal.high and equal.n == 200
    same = pairs.ClassifierTwoSample().compare(one, one, seed=1)["test"]
    assert same.low < 50 < same.high
    other = pairs.ClassifierTwoSample().compare(one, third, seed=1)["test"]
    assert other.low > 50


def test_c2st_holds_its_level_over_seeds(noise):
    one, two, _ = noise
    inside = [
        m.low <= 50 <= m.high
        for seed in range(20)
        for m in [pairs.ClassifierTwoSample().compare(one, two, seed=seed)["test"]]
    ]
    assert sum(inside) >= 17


def test_c2st_of_a_handful_gives_no_number(make_scores):
    few = {"forget": make_scores(np.full((7, 2), 0.5))}
    found = pairs.ClassifierTwoSample().compare(few, few, seed=0)["forget"]
    assert found.value is None and "only 7" in found.note


def class_scenario(make_scores, forget_probs):
    retain = make_scores(np.eye(3)[[0, 1]], [0, 1])
    return {"retain": retain, "forget": make_scores(forget_probs, [2] * len(forget_probs))}


def test_retained_kl_ignores_the_forgotten_class(make_scores):
    r = class_scenario(make_scores, [[0.1, 0.3, 0.6]])
    u = class_scenario(make_scores, [[0.25, 0.75, 0.0]])
    found = pairs.RetainedKL().compare(u, r, seed=0)["forget"]
    assert found.value == pytest.approx(0, abs=1e-12)
    swapped = class_scenario(make_scores, [[0.3, 0.1, 0.6]])
    found = pairs.RetainedKL().compare(swapped, r, seed=0)["forget"]
    # Retrain first: KL((.25, .75) || (.75, .25))
    assert found.value == pytest.approx(0.5 * math.log(3))


def test_cmia_sees_a_model_that_avoids_the_neighbour(make_scores):
    rng = np.random.default_rng(1)

    def outputs(center):
        near = 1 / (1 + np.exp(-rng.normal(center, 0.5, size=60)))
        return np.stack([near, 1 - near, np.zeros(60)], axis=1)

    r, second, u = (class_scenario(make_scores, outputs(c)) for c in (2.0, 2.0, -2.0))
    floor = pairs.NeighbourClass().compare(second, r, seed=0)["forget"]
    found = pairs.NeighbourClass().compare(u, r, seed=0)["forget"]
    assert found.value > 99 and found.low > 90
    assert 50 <= floor.value < 70 and floor.low < 60
    assert pairs.NeighbourClass().compare(r, r, seed=0)["forget"].value == 50


def test_auc_counts_ties_half():
    assert auc(np.array([1.0, 2.0]), np.array([1.0, 0.0])) == pytest.approx(87.5)


@pytest.mark.parametrize("audit", [pairs.RetainedKL, pairs.NeighbourClass])
def test_the_class_audits_refuse_random_forgetting(audit, make_scores):
    parts = {
        "retain": make_scores(np.full((2, 3), 1 / 3), [0, 2]),
        "forget": make_scores(np.full((1, 3), 1 / 3), [2]),
    }
    with pytest.raises(NotApplicable, match="whole classes"):
        audit().compare(parts, parts, seed=0)


def test_other_samples_are_refused(make_scores):
    one = {"test": make_scores(np.full((2, 2), 0.5), indices=[1, 2])}
    two = {"test": make_scores(np.full((2, 2), 0.5), indices=[1, 3])}
    with pytest.raises(DataError, match="different samples"):
        pairs.JensenShannon().compare(one, two, seed=0)


def test_test_stands_for_every_held_out_part():
    parts = ("retain", "test_forget", "test_b", "forget", "test_a", "test_earlier")
    held_out = Part(Role.REPORT, utility=True)
    table = {**PARTS, "test_a": held_out, "test_b": held_out}
    assert utility_parts(parts, table) == ["test_a", "test_b"]
    assert utility_parts(("test_forget", "test")) == ["test"]
    with pytest.raises(DataError, match=r"'tset' has no role; .*did you mean 'test'"):
        utility_parts(("tset",))
    assert wanted_parts(("forget", "test", "test_forget"), parts, table) == [
        "forget",
        "test_a",
        "test_b",
        "test_forget",
    ]
    with pytest.raises(NotApplicable, match="nothing is called forgot; parts: forget, retain"):
        wanted_parts(("forgot",), ("retain", "forget"))


def test_parts_without_a_softmax_are_left_out(make_scores):
    parts = {"forget": make_scores(margin=[0.0]), "test": make_scores(np.full((2, 2), 0.5))}
    assert list(pairs.JensenShannon().compare(parts, parts, seed=0)) == ["test"]


def test_scores_without_softmax_are_not_applicable(make_scores):
    parts = {"test": make_scores(margin=[0.0, 1.0])}
    with pytest.raises(NotApplicable, match="softmax"):
        pairs.JensenShannon().compare(parts, parts, seed=0)
