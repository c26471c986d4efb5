"""Gaps, averages, intervals, ranks and the noise floor."""

from __future__ import annotations

import math
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial import distance

from stable_forgetting.common.measure.answers import answer_distances
from stable_forgetting.common.measure.gaps import (
    average_gap,
    derived,
    gap,
    harmonic_mean,
    ks_two_sample,
    paired_difference,
    retrain_floor,
    summarise,
)
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.ranking import rank_intervals, ranks, shares, shown
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.vision.metrics import GAP

AG4 = GAP.metrics
RETRAIN = {"fa": 90.0, "ua": 10.0, "ra": 99.0, "ta": 88.0, "mia": 20.0}
ROW = {"fa": 94.0, "ua": 6.0, "ra": 98.0, "ta": 85.0, "mia": 12.0}


def test_gaps_by_hand():
    assert ROW["ua"] + ROW["fa"] == RETRAIN["ua"] + RETRAIN["fa"] == 100
    assert gap(ROW, RETRAIN, "ua") == -4 and gap(ROW, RETRAIN, "fa") == 4
    assert average_gap(ROW, RETRAIN, AG4) == (4 + 1 + 3 + 8) / 4
    assert average_gap(ROW, RETRAIN, ("fa", "ra", "ta", "mia")) == (4 + 1 + 3 + 8) / 4
    assert further("ag2") == (3 + 8) / 2
    assert further("max_gap") == 8
    assert further("tow") == pytest.approx(0.96 * 0.99 * 0.97)
    assert further("tow_mia") == pytest.approx(0.92 * 0.99 * 0.97)


def further(name, row=ROW, target=RETRAIN):
    """A further column of the vision tables."""
    return derived(
        row, target, next(column for column in GAP.also if column.name == name), GAP.metrics
    )


@pytest.mark.parametrize("name", [column.name for column in GAP.also])
def test_retrain_against_itself_and_unknown_values(name):
    assert further(name, RETRAIN) == (1 if name in ("tow", "tow_mia") else 0)
    for broken in (ROW | {"mia": None, "ta": None}, {}):
        assert further(name, broken) is None and further(name, RETRAIN, broken) is None
        assert average_gap(broken, RETRAIN, AG4) is None


percent = st.floats(0, 100)
rows = st.fixed_dictionaries({name: percent for name in ("fa", "ua", "ra", "ta", "mia")})


@given(rows, rows)
def test_gap_properties(row, reference):
    ag = average_gap(row, reference, AG4)
    assert ag == average_gap(reference, row, AG4)
    assert 0 <= ag <= further("max_gap", row, reference) + 1e-9
    assert 0 <= further("tow", row, reference) <= 1
    assert gap(row, reference, "ta") == -gap(reference, row, "ta")


def test_metric_spec_arrows():
    arrows = [MetricSpec("m", better, "M").arrow for better in ("higher", "lower", "target")]
    assert arrows == ["↑", "↓", "→ Retrain"]
    with pytest.raises(AssertionError, match="better"):
        MetricSpec("m", "up", "M")  # type: ignore[arg-type]


def test_harmonic_mean():
    assert harmonic_mean([1.0, 0.5]) == pytest.approx(2 / 3)
    assert harmonic_mean([1.0, 0.0]) == 0
    assert harmonic_mean([1.0, None]) is None
    values = [0.3, 0.9, 0.55]
    assert harmonic_mean(values) == pytest.approx(stats.hmean(values))


def test_ks_by_hand_and_against_scipy():
    apart = ks_two_sample([1, 2, 3], [4, 5, 6])
    assert apart == (1, pytest.approx(2 / math.comb(6, 3)))
    first, second = [0.1, 0.4, 0.5, 0.9], [0.2, 0.45, 1.3]
    assert ks_two_sample(first, second)[1] == stats.ks_2samp(first, second).pvalue
    with pytest.raises(AssertionError, match="finite"):
        ks_two_sample([1.0, math.nan], [1.0])


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.sampled_from([0.8, 0.95, 0.99]))
def test_t_interval_matches_scipy(values, confidence):
    summary = summarise(values, confidence)
    assert summary.low <= summary.mean <= summary.high and summary.n == len(values)
    if summary.std > 1e-9:
        low, high = stats.t.interval(
            confidence, len(values) - 1, loc=summary.mean, scale=stats.sem(values)
        )
        assert (summary.low, summary.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)


def test_summaries_and_differences_of_too_few_or_equal_values():
    one = summarise([5.0])
    assert (one.mean, one.std, one.low, one.high, one.n) == (5.0, None, None, None, 1)
    assert paired_difference([1.0], [2.0]).p_value is None
    assert paired_difference([1.0, 2.0], [1.0, 2.0]).p_value == 1
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).p_value == 0.5, "two seeds alone"
    assert paired_difference([0.3, 0.4, 0.5], [0.2, 0.3, 0.4]).p_value == 0.25, "equal but rounding"
    far = [100 / 17**0.5 + move for move in (*[-1.0, 1.0] * 8, 0.0)]  # t is 100
    assert paired_difference(far, [0.0] * 17).p_value == 0


def test_retrain_floor():
    def ag4(row, target):
        return average_gap(row, target, AG4)

    first = [RETRAIN, RETRAIN | {"ra": 98.0}, RETRAIN]
    second = [RETRAIN | {"mia": 24.0}, RETRAIN, RETRAIN | {"mia": None}]
    floor = retrain_floor(first, second, ag4)
    assert floor.per_seed == (1.0, 0.25, None)
    assert floor.summary.mean == 0.625 and floor.summary.n == 2
    assert retrain_floor(first[:1], second[2:], ag4).summary is None
    assert retrain_floor(first, first, ag4).per_seed == (0.0, 0.0, 0.0)


@given(st.lists(st.tuples(percent, percent), min_size=2, max_size=8))
def test_paired_difference_matches_scipy(pairs):
    first, second = zip(*pairs, strict=True)
    result = paired_difference(first, second)
    assert 0 <= result.p_value <= 1
    if result.summary.std > 1e-6:
        expected = stats.ttest_rel(first, second).pvalue
        assert result.p_value == pytest.approx(expected, rel=1e-6, abs=1e-12)


def scores(probs: list[list[float]] | None, indices=(4, 7)) -> Scores:
    zeros = np.zeros(len(indices), np.float32)
    arrays = dict.fromkeys(
        ("loss", "probability", "margin", "entropy", "modified_entropy", "correct"), zeros
    )
    softmax = None if probs is None else np.array(probs, np.float32)
    return Scores(indices=np.array(indices), probs=softmax, **arrays)


def told(first, second):
    return answer_distances(first, second, ["a"], attrgetter("probs"))


def test_equal_answers_are_at_zero_and_opposite_ones_at_ln_2():
    same, other = scores([[1, 0], [0, 1]]), scores([[0, 1], [1, 0]])
    assert told({"a": same}, {"a": same}) == {"js_a": 0, "changed_a": 0}
    apart = told({"a": same}, {"a": other})
    assert apart == {"js_a": pytest.approx(math.log(2)), "changed_a": 100}
    p, q = np.array([[0.9, 0.1], [0.6, 0.4]]), np.array([[0.8, 0.2], [0.4, 0.6]])
    made = told({"a": scores(p)}, {"a": scores(q)})
    by_hand = distance.jensenshannon(p, q, axis=1) ** 2  # a mean over samples
    assert made == {"js_a": pytest.approx(by_hand.mean()), "changed_a": 50}


@pytest.mark.parametrize(
    "other", [{}, {"a": scores(None)}, {"a": scores([[1, 0], [0, 1]], indices=(4, 8))}]
)
def test_what_cannot_be_compared_is_unknown(other):
    own = {"a": scores([[1, 0], [0, 1]])}
    assert told(own, other) == {"js_a": None, "changed_a": None}


def test_ties_share_the_best_rank():
    values = np.array([2.0, 1.0, 2.0, 3.0])
    assert ranks(values).tolist() == [2, 1, 2, 4]
    drawn = np.random.default_rng(0).integers(4, size=(6, 9)).astype(float)
    assert (ranks(drawn) == stats.rankdata(drawn, method="min", axis=-1)).all()
    assert ranks(shown(np.array([0.301, 0.304, 0.306]))).tolist() == [1, 1, 3]


def test_intervals_are_as_wide_as_the_seeds_disagree():
    sure = np.array([[1.0, 1.1, 1.2], [5.0, 5.1, 5.2], [9.0, 9.1, 9.0]])
    low, high = rank_intervals(sure)
    assert low.tolist() == high.tolist() == [1, 2, 3]
    crossing = np.array([[1.0, 9.0, 2.0], [2.0, 1.0, 9.0], [50.0, 51.0, 52.0]])
    low, high = rank_intervals(crossing)
    assert low.tolist() == [1, 1, 3] and high.tolist() == [2, 2, 3]


def test_equal_rows_have_equal_ranks_in_every_draw():
    row = np.array([1.0, 4.0, 2.5])
    low, high = rank_intervals(np.stack([row, row, row + 1]))
    assert low.tolist() == [1, 1, 3] == high.tolist()


def test_seeds_are_drawn_for_all_rows_at_once():
    """Rows that a hard split moves alike keep their order, however far it moves them."""
    rows = np.array([[1.0, 30.0, 3.0], [1.5, 30.5, 3.5]])
    assert [ends.tolist() for ends in rank_intervals(rows)] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("n", [3, 5])
def test_intervals_cover_the_true_rank(n):
    """Means a standard deviation of the seeds apart, simulated."""
    rng, covered = np.random.default_rng(n), []
    for _ in range(60):
        true = rng.standard_normal(10)
        table = true[:, None] + rng.standard_normal((10, n)) + rng.standard_normal(n)
        low, high = rank_intervals(table, draws=300)
        covered.append(np.mean((low <= ranks(true)) & (ranks(true) <= high)))
    assert np.mean(covered) > 0.9


def test_other_trials_widen_an_interval_and_only_to_worse_ranks():
    sure = np.array([[1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [3.0, 3.1, 3.2]])
    low, high = rank_intervals(sure, [[0.5, 4.0, np.inf], [0.7, 0.7], []])
    assert low.tolist() == [1, 1, 2] and high.tolist() == [3, 2, 3]
    assert [ends.tolist() for ends in rank_intervals(sure, [[np.inf]] * 3)] == [[1, 2, 3]] * 2
    low, high = rank_intervals(sure, [[1.0, np.inf, np.inf, np.inf], [], []])
    assert low.tolist() == [1, 1, 2] and high.tolist() == [3, 2, 3], "other draws all diverge"


def test_an_interval_holds_the_rows_own_rank():
    """Trials move the rows before the last one away from it in nearly every draw."""
    sure = np.arange(21.0)[:, None] + np.zeros(3)
    low, high = rank_intervals(sure, [[0.0, 90.0]] * 20 + [[]])
    assert low[-1] < 15 and high[-1] == 21


def test_trials_carry_the_luck_of_tuning():
    """Rows are the best of four trials: the true rank is that of the best of four on average."""
    rng, covered = np.random.default_rng(2), {"seeds": [], "both": []}
    for _ in range(60):
        best = 2 * rng.standard_normal(12)
        trials = best[:, None] + rng.exponential(4, (12, 4))
        noise = 0.5 * (rng.standard_normal((12, 5)) + rng.standard_normal(5))
        table, true = trials.min(1)[:, None] + noise, ranks(best)
        for known, own in (("seeds", ()), ("both", trials.tolist())):
            low, high = rank_intervals(table, own, draws=300)
            covered[known].append(np.mean((low <= true) & (true <= high)))
    assert np.mean(covered["seeds"]) < 0.8 < 0.88 < np.mean(covered["both"])


def test_more_seeds_make_ranks_surer():
    rng, widths = np.random.default_rng(0), []
    for n in (5, 10, 40):
        tables = np.arange(8.0)[:, None] + 4 * rng.exponential(size=(10, 8, n))
        ends = [rank_intervals(table, draws=200) for table in tables]
        widths.append(np.mean([high - low for low, high in ends]))
    assert widths == sorted(widths, reverse=True)


def test_shares_of_a_distance_add_up_to_one():
    drawn = np.random.default_rng(0).exponential(size=(7, 3))
    rows = [dict(zip("abc", values, strict=True)) for values in drawn.tolist()]
    share = shares(rows)
    assert sum(share.values()) == pytest.approx(1)
    assert share["b"] == pytest.approx(drawn[:, 1].sum() / drawn.sum())
    assert shares([]) == shares([{"a": 0.0}]) == {}
