"""Ranks with their ties, and how sure they are."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from stable_forgetting.common.measure.ranking import rank_intervals, ranks, shares, shown


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
