"""Membership attacks: golden values, the lineage's own procedure, and the known traps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from stable_forgetting.common.base.errors import ConfigError, DataError, Diverged
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.membership import attacks
from stable_forgetting.common.membership.attacks import (
    DRAWS,
    FEATURES,
    logistic_attack,
    loss_threshold_attack,
    membership_metrics,
    svc_attack,
)
from stable_forgetting.vision.metrics import vision_metrics

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mia.json").read_text())


def scores_from(logits, labels) -> Scores:
    """Scores by the plain float64 formulas, rounded to float32 at the end."""
    z, y = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    rows = np.arange(len(y))
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    true = p[rows, y]
    terms = p * np.log1p(-p)
    terms[rows, y] = 0
    values = {
        "loss": -np.log(true),
        "probability": true,
        "margin": np.log(true) - np.log1p(-true),
        "entropy": -(p * np.log(p)).sum(1),
        "modified_entropy": -(1 - true) * np.log(true) - terms.sum(1),
        "correct": z.argmax(1) == y,
        "probs": p,
    }
    arrays = {name: array.astype(np.float32) for name, array in values.items()}
    return Scores(indices=rows.astype(np.int64), labels=y.astype(np.int64), **arrays)


def from_margins(margins, labels=None) -> Scores:
    """A two-class model with these margins."""
    margins = np.asarray(margins, dtype=np.float64)
    labels = np.zeros(len(margins), np.int64) if labels is None else np.asarray(labels)
    sign = np.where(labels == 0, 0.5, -0.5)
    return scores_from(np.stack([margins * sign, -margins * sign], axis=1), labels)


@pytest.fixture(scope="module")
def golden() -> dict[str, Scores]:
    return {name: scores_from(**part) for name, part in GOLDEN["parts"].items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_svc_golden(golden, feature):
    result = svc_attack(*(golden[k] for k in ("members", "nonmembers", "targets")), feature)
    expected = GOLDEN["expected"][feature]
    assert result.efficacy == pytest.approx(expected["efficacy"])
    assert result.balanced_accuracy == pytest.approx(expected["balanced_accuracy"])


def test_efficacy_is_the_share_called_nonmember():
    members, nonmembers = from_margins([6.0] * 20), from_margins([-6.0] * 20)
    targets = from_margins([6.0] * 3 + [-6.0] * 9)
    for result in (
        svc_attack(members, nonmembers, targets),
        logistic_attack(members, nonmembers, targets),
    ):
        assert result.efficacy == 75.0 and result.balanced_accuracy == 100.0


def test_unknown_feature_and_missing_probs(golden):
    three = [golden[name] for name in ("members", "nonmembers", "targets")]
    with pytest.raises(ConfigError, match="did you mean 'confidence'"):
        svc_attack(*three, "confidense")
    with pytest.raises(DataError, match="keep the softmax"):
        svc_attack(*(replace(part, probs=None) for part in three), "probs")


def test_logistic_wrong_sign_is_chance():
    """Members below non-members: a collapsing model, not a reason to invert the attack."""
    rng = np.random.default_rng(0)
    low, high = from_margins(rng.normal(-2, 1, 50)), from_margins(rng.normal(2, 1, 50))
    targets = from_margins(rng.normal(-9, 1, 30))
    assert logistic_attack(low, high, targets) == attacks.CHANCE
    assert logistic_attack(high, low, targets).efficacy == 100.0
    same = from_margins([1.0] * 10)
    assert logistic_attack(same, same, same) == attacks.CHANCE, "no signal"


def test_logistic_clips_the_margin():
    members, nonmembers = from_margins([15.0, 16.0, 14.0]), from_margins([-15.0, -16.0, -14.0])
    near = logistic_attack(members, nonmembers, from_margins([15.0]))
    members.margin[0] = 1e6
    assert logistic_attack(members, nonmembers, from_margins([15.0])) == near


def test_attacks_refuse_non_finite_scores(golden):
    broken = golden["targets"].select(np.arange(5))
    broken.margin[2] = np.nan
    with pytest.raises(Diverged, match="margin"):
        logistic_attack(golden["members"], golden["nonmembers"], broken)


def test_loss_threshold_by_hand():
    """200 test losses 1..200: 2 false positives are 1 %, so tau is just below the third, 3."""
    test = np.arange(1.0, 201.0)
    forget = np.array([0.5, 2.5, 3.0, 100.5])
    result = loss_threshold_attack(forget, test)
    assert result["mia_tpr_1"] == 50.0 and result["mia_tpr_01"] is None
    # Test losses above each: 200, 198, 197 and a tie, 100.
    assert result["mia_auc"] == pytest.approx(100 * (200 + 198 + 197.5 + 100) / 800)
    # Best threshold is 3: TPR 3/4, FPR 3/200.
    assert result["mia_threshold_bacc"] == pytest.approx(50 + 50 * (0.75 - 0.015))


@pytest.mark.parametrize(
    ("n", "has_1", "has_01"), [(99, False, False), (100, True, False), (1000, True, True)]
)
def test_tpr_is_none_below_its_resolution(n, has_1, has_01):
    result = loss_threshold_attack(np.zeros(5), np.arange(1.0, n + 1))
    rates = [result["mia_tpr_1"], result["mia_tpr_01"]]
    assert rates == [100.0 if has else None for has in (has_1, has_01)]


losses = st.lists(st.integers(0, 12).map(float), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(losses, losses)
def test_loss_threshold_properties(forget, test):
    result = loss_threshold_attack(forget, test)
    truth = [1] * len(forget) + [0] * len(test)
    assert result["mia_auc"] == pytest.approx(
        100 * roc_auc_score(truth, [-x for x in forget + test])
    )
    mirrored = loss_threshold_attack(test, forget)
    assert result["mia_auc"] + mirrored["mia_auc"] == pytest.approx(100)
    brute = [
        50 * (np.mean(np.array(forget) <= tau) + np.mean(np.array(test) > tau))
        for tau in [-1.0, *forget, *test]
    ]
    assert result["mia_threshold_bacc"] == pytest.approx(max(brute))


def parts_of(rng, sizes=(40, 300, 120), means=(4, 6, 3), classes=4) -> dict[str, Scores]:
    def draw(n, mean):
        labels = np.sort(rng.integers(0, classes, n))
        centers = rng.normal(mean, 2, (n, 1)) * np.eye(classes)[labels]
        return scores_from(rng.normal(0, 1, (n, classes)) + centers, labels)

    return {
        name: draw(n, m)
        for name, n, m in zip(("forget", "retain", "test"), sizes, means, strict=True)
    }


def test_membership_metrics_keys_and_seeds():
    parts = parts_of(np.random.default_rng(0))
    metrics = membership_metrics(*parts.values(), seed=1)
    assert set(metrics) == {
        "mia", "mia_bacc", "mia_correctness", "mia_entropy", "mia_modified_entropy", "mia_probs",
        "mia_logistic", "mia_auc", "mia_tpr_1", "mia_tpr_01", "mia_threshold_bacc",
    }  # fmt: skip
    assert metrics["mia_tpr_01"] is None and metrics["mia_tpr_1"] is not None
    assert membership_metrics(*parts.values(), seed=1) == metrics
    few = membership_metrics(*parts.values(), seed=1, features=("confidence",))
    assert few == {key: metrics[key] for key in few} and "mia_entropy" not in few


def test_membership_metrics_without_probs():
    parts = parts_of(np.random.default_rng(1))
    plain = {name: replace(part, probs=None, labels=None) for name, part in parts.items()}
    metrics = membership_metrics(*plain.values(), seed=1, features=("confidence", "probs"))
    assert metrics["mia_probs"] is None and metrics["mia"] is not None


def test_members_are_balanced_over_classes_not_the_first_in_order(monkeypatch):
    """Labels are sorted: the lineage's "first |test| of retain" would be one or two classes."""
    seen = []
    real = svc_attack

    def spy(members, nonmembers, *rest):
        seen.append((members, nonmembers))
        return real(members, nonmembers, *rest)

    monkeypatch.setattr("stable_forgetting.common.membership.attacks.svc_attack", spy)
    parts = parts_of(np.random.default_rng(2), sizes=(20, 400, 100))
    for seed in (1, 2):
        membership_metrics(*parts.values(), seed=seed, features=("confidence",))
    members, nonmembers = seen[0]
    assert np.bincount(members.labels).tolist() == [25] * 4
    assert len(nonmembers) == 100
    assert len(seen) == 2 * DRAWS
    drawn = {tuple(members.indices.tolist()) for members, _ in seen}
    assert len(drawn) == 2 * DRAWS, "every draw of every seed is another one"


def test_the_attack_is_the_mean_over_draws_of_members():
    parts = parts_of(np.random.default_rng(2), sizes=(40, 400, 60))
    alone = []
    for draw in range(DRAWS):
        members = attacks._draw(parts["retain"], 60, 1, "members", draw)
        alone.append(svc_attack(members, parts["test"], parts["forget"], "confidence"))
    metrics = membership_metrics(*parts.values(), seed=1, features=("confidence",))
    assert metrics["mia"] == pytest.approx(np.mean([result.efficacy for result in alone]))
    assert metrics["mia_bacc"] == pytest.approx(
        np.mean([result.balanced_accuracy for result in alone])
    )
    assert len({result.efficacy for result in alone}) > 1, "a single draw is not the answer"


@pytest.mark.parametrize(
    ("sizes", "fits"), [((20, 80, 80), [(80, 80, 20)]), ((20, 50, 200), [(50, 50, 20)] * DRAWS)]
)
def test_sides_are_equal_and_drawn_again_only_where_some_are_left_out(monkeypatch, sizes, fits):
    fitted = []
    monkeypatch.setattr(
        attacks, "logistic_attack", lambda *a: fitted.append((*map(len, a),)) or logistic_attack(*a)
    )
    membership_metrics(*parts_of(np.random.default_rng(3), sizes).values(), seed=1, features=())
    assert fitted == fits


def test_vision_metrics_name_a_missing_part():
    parts = parts_of(np.random.default_rng(4))
    del parts["test"]
    with pytest.raises(ConfigError, match="part 'test'"):
        vision_metrics(parts, trial=False, seed=1, features=())
