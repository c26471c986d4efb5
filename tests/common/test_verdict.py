"""Verdicts: the odd-one-out test, its correction, the log ratio and the equivalence test."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stable_forgetting.common.measure import verdict
from stable_forgetting.common.measure.verdict import (
    LEAST_SEEDS,
    LEVEL,
    MARGIN,
    Evidence,
    benjamini_hochberg,
    holm,
    judge,
    median,
    odd_one_out,
    odd_seeds,
    oddness,
    sign_test,
)


def triangle(to_first: float, to_second: float, between: float) -> np.ndarray:
    """(3, 3) distances of a model and two Retrains."""
    return np.array(
        [[0, to_first, to_second], [to_first, 0, between], [to_second, between, 0]], float
    )


def distances(*triangles: tuple[float, float, float]) -> np.ndarray:
    return np.array([triangle(*sides) for sides in triangles])


def seeds(*triangles: tuple[float, float, float], resolution: float = 0.01) -> np.ndarray:
    return oddness(distances(*triangles), resolution)


def evidence(*triangles, answers=None, resolution: float = 0.01) -> Evidence:
    """A row whose answers agree as its averages do, unless others are given; None for none."""
    made = distances(*triangles)
    return Evidence(made, resolution, made if answers is None else answers)


FAR, NEAR, SAME = (8.0, 9.0, 1.0), (1.0, 1.1, 1.2), (1.0, 1.0, 1.0)


def test_oddness_is_the_log_ratio_of_both_distances_to_the_one_between():
    scores = seeds((3.0, 5.0, 2.0), resolution=0.5)
    expected = (math.log(3.5) + math.log(5.5)) / 2 - math.log(2.5)
    assert scores[0, 0] == pytest.approx(expected)
    assert scores.sum(1) == pytest.approx(0)
    assert seeds((0.0, 0.0, 0.0))[0] == pytest.approx(0), "nothing differs, nothing is odd"
    with pytest.raises(AssertionError, match="two or more Retrains"):
        oddness(np.zeros((3, 2, 2)), 0.01)


def test_the_odd_one_is_the_one_with_the_largest_mean_distance():
    points = np.random.default_rng(0).exponential(size=(500, 3, 2))
    distances = np.abs(points[:, :, None] - points[:, None]).mean(-1)
    assert (oddness(distances, 0.01).argmax(1) == distances.sum(-1).argmax(1)).all()


def lost(n: int) -> np.ndarray:
    """(n, 3, 3) distances of which the ones to and from a member differ: what one lost alone."""
    points = np.random.default_rng(1).normal(size=(n, 3))
    return np.maximum(0, points[:, None, :] - points[:, :, None])


def test_where_only_what_is_lost_is_charged_every_member_is_asked_alike():
    made = lost(6)
    scores = oddness(made, 0.01)
    assert scores.sum(1) == pytest.approx(0)
    for order in itertools.permutations(range(3)):
        swapped = made[:, order][:, :, order]
        assert oddness(swapped, 0.01) == pytest.approx(scores[:, order]), "no member is special"


def test_a_model_that_loses_nothing_is_not_odd():
    losing = np.array([[[0, 0, 0], [30, 0, 1], [30, 1, 0]]] * 5, float)
    assert odd_one_out(oddness(losing, 0.01)) > 0.99
    gaining = losing.transpose(0, 2, 1)
    assert odd_one_out(oddness(gaining, 0.01)) == pytest.approx(3**-5)


@pytest.mark.parametrize(("n", "p"), [(3, 0.037), (5, 0.0041)])
def test_odd_on_every_seed_is_the_binomial_p(n, p):
    scores = seeds(*[FAR] * n)
    assert odd_seeds(scores) == n
    assert odd_one_out(scores) == pytest.approx(3**-n) == pytest.approx(p, abs=5e-4)
    assert odd_one_out(scores) == pytest.approx(stats.binomtest(n, n, 1 / 3).pvalue, rel=1e-6)


@pytest.mark.parametrize("retrains", [2, 3, 4])
def test_p_counts_every_way_to_name_the_model(retrains):
    drawn = np.random.default_rng(retrains).exponential(size=(5, retrains + 1, 3))
    scores = oddness(np.abs(drawn[:, :, None] - drawn[:, None]).mean(-1), 0.01)
    ways = [
        sum(scores[seed, member] for seed, member in enumerate(named))
        for named in itertools.product(range(retrains + 1), repeat=5)
    ]
    assert odd_one_out(scores) == pytest.approx(np.mean([w >= ways[0] - 1e-9 for w in ways]))


def test_ties_are_shared():
    assert odd_seeds(seeds(SAME, SAME, SAME)) == pytest.approx(1)
    assert odd_one_out(seeds(SAME, SAME, SAME)) == 1
    tie = seeds((5.0, 1.0, 1.0))
    assert odd_seeds(tie) == pytest.approx(1 / 2), "model and first Retrain are equally far"
    assert odd_one_out(tie) == pytest.approx(2 / 3)


def test_many_seeds_are_drawn_and_agree_with_the_exact_p(monkeypatch):
    scores = seeds(*[(1.3, 1.2, 1.0), (1.0, 1.4, 1.1)] * 6)
    exact = odd_one_out(scores)
    monkeypatch.setattr(verdict, "_ENUMERATED", 1)
    assert odd_one_out(scores) == pytest.approx(exact, abs=4 * math.sqrt(exact / 2**16))
    assert odd_one_out(seeds(*[FAR] * 40)) == 2**-16, "the model's own naming is one of the ways"


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=20))
def test_correction_is_that_of_scipy(p):
    expected = stats.false_discovery_control(p)
    assert np.minimum(benjamini_hochberg(p), 1) == pytest.approx(expected)
    assert len(benjamini_hochberg([])) == 0


def test_the_correction_counts_the_rows_of_the_table():
    alone = judge({"far": evidence(*[FAR] * 5)})["far"]
    assert alone.word == "different" and alone.q == pytest.approx(3**-5)
    rows = {f"near {k}": evidence(*[NEAR] * 5) for k in range(15)}
    crowd = judge({"far": evidence(*[FAR] * 5), **rows})["far"]
    assert crowd.q == pytest.approx(16 * 3**-5) and crowd.word == "undecided"
    assert crowd.detectable is None, "no size is shown by five seeds beside so many equal rows"


def test_rows_differ_together_though_none_is_odd_on_every_seed():
    """With 5 seeds and 20 rows at least two differ, or none does: p is 1/243 at least."""
    sides = [*[FAR] * 4, (2.0, 3.2, 3.0)]  # on the last seed a Retrain is the odd one
    rows = {f"near {k}": evidence(*[SAME] * 5) for k in range(16)}
    made = judge({f"far {k}": evidence(*sides) for k in range(4)} | rows)
    assert (made["far 0"].word, made["far 0"].odd) == ("different", 4)
    alone = judge({"far": evidence(*[FAR] * 5), **rows})
    assert alone["far"].p == pytest.approx(1 / 243) and alone["far"].word == "undecided"


@pytest.mark.parametrize("n", [1, 3, 4])
def test_few_seeds_carry_p_and_no_mark(n):
    row = judge({"far": evidence(*[FAR] * n)})["far"]
    assert row.word == "untested" and row.p == pytest.approx(3**-n) and n < LEAST_SEEDS


def test_indistinguishable_takes_averages_and_answers():
    like, off = [NEAR, (1.1, 1.0, 1.2), (0.9, 1.0, 1.0), SAME, (1.0, 1.1, 1.0)], (6.0, 6.0, 1.0)
    both = judge({"row": evidence(*like)})["row"]
    assert both.word == "indistinguishable" and both.p_equivalent == 2**-5
    once = judge({"row": evidence(*like[:4], off)})["row"]
    assert once.word == "undecided" and once.p_equivalent == pytest.approx(6 / 32)
    wrong = judge({"row": evidence(*like, answers=distances(*[off] * 5))})["row"]
    assert wrong.word == "undecided" and wrong.p_equivalent == 1, "right averages, other answers"
    unknown = judge({"row": Evidence(distances(*like), 0.01)})["row"]
    assert unknown.word == "undecided" and unknown.p_equivalent is None and unknown.answers is None


def test_indistinguishable_is_corrected_for_the_rows():
    def words(n: int, rows: int) -> set[str]:
        made = judge(
            {str(k): evidence(*[NEAR, SAME] * (n // 2), *[SAME] * (n % 2)) for k in range(rows)}
        )
        return {row.word for row in made.values()}

    assert words(5, 1) == {"indistinguishable"} and words(5, 2) == {"undecided"}
    assert words(10, 50) == {"indistinguishable"} and words(10, 52) == {"undecided"}


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=12))
def test_holm_rejects_step_by_step(p):
    corrected, order = holm(p), np.argsort(p)
    for level in (0.01, 0.05, 0.3):
        rejected = 0
        while rejected < len(p) and p[order[rejected]] * (len(p) - rejected) <= level:
            rejected += 1
        assert (corrected <= level).sum() == rejected
    assert len(holm([])) == 0


def test_the_sign_test_is_the_binomial_one():
    ratios = np.array([-1.0, 0.2, 0.5, 0.9, 0.1])
    assert sign_test(ratios) == pytest.approx(stats.binomtest(4, 5, 0.5, "greater").pvalue)


@pytest.mark.parametrize(("n", "outer"), [(4, 0), (5, 1), (8, 2), (10, 2), (20, 6)])
def test_the_interval_of_a_median_is_the_sign_test(n, outer):
    values = [float(k) for k in range(n)]
    found = median(values)
    assert found.value == (n - 1) / 2
    assert (found.low, found.high) == ((outer - 1, n - outer) if outer else (None, None))
    if outer:
        assert stats.binomtest(n - outer + 1, n, 0.5, "greater").pvalue <= LEVEL
    assert stats.binomtest(n - outer, n, 0.5, "greater").pvalue > LEVEL


def test_a_small_difference_is_a_difference():
    row = judge({"row": evidence(*[(1.3, 1.31, 1.0), (1.32, 1.3, 1.01)] * 4)})["row"]
    assert row.word == "different" and row.p_equivalent <= LEVEL == 0.05
    assert math.exp(MARGIN) == pytest.approx(2), "twice the floor"


def test_an_undecided_row_says_which_size_would_have_been_a_difference():
    sides = [(1.5, 1.4, 1.0), (2.0, 1.0, 1.4), (3.0, 2.0, 1.0), (1.0, 1.1, 1.2), (0.9, 1.4, 1.0)]
    others = {"far": evidence(*[FAR] * 5), "near": evidence(*[NEAR] * 5)}
    row = judge({"row": evidence(*sides, resolution=1e-9), **others})["row"]
    assert row.word == "undecided" and row.detectable > row.ratio.value

    def scaled(by):
        further = [(by * first, by * second, between) for first, second, between in sides]
        return judge({"row": evidence(*further, resolution=1e-9), **others})["row"]

    factor = math.exp(row.detectable - row.ratio.value)
    assert scaled(1.01 * factor).word == "different" and scaled(0.99 * factor).word != "different"
    assert scaled(1.01 * factor).ratio.value == pytest.approx(row.detectable, abs=0.02)
