from __future__ import annotations

import json
import math

import numpy as np
import pytest

from stable_forgetting.common.audits.base import Measure
from stable_forgetting.common.audits.intervals import (
    LARGE,
    accuracy,
    bootstrap,
    bootstrap_mean,
    clopper_pearson,
    dkw,
    proportion,
)


def test_clopper_pearson_at_the_ends_is_the_closed_form():
    low, high = clopper_pearson(np.array([0, 10]), 10)
    assert low[0] == 0 and high[1] == 1
    assert high[0] == pytest.approx(1 - 0.025 ** (1 / 10))
    assert low[1] == pytest.approx(0.025 ** (1 / 10))


def test_clopper_pearson_inverts_the_binomial():
    from scipy.stats import binom

    low, high = (float(end) for end in clopper_pearson(7, 20))
    assert binom.sf(6, 20, low) == pytest.approx(0.025)
    assert binom.cdf(7, 20, high) == pytest.approx(0.025)


def test_a_share_of_few_samples_says_so():
    measure = proportion(np.array([True] * 3 + [False]))
    assert measure.value == 75 and measure.n == 4
    assert "only 4" in measure.note and "Clopper-Pearson" in measure.interval
    assert proportion(np.ones(30, dtype=bool)).note == ""


def test_accuracy_of_tokens_is_a_mean_and_not_a_majority():
    shares = np.array([0.6, 0.6, 0.6, 0.0])
    assert accuracy(shares, 0).value == pytest.approx(45)
    assert "bootstrap" in accuracy(shares, 0).interval
    assert accuracy(np.array([1.0, 0.0]), 0) == proportion(np.array([True, False]))


def test_dkw_is_massarts():
    assert dkw(50) == pytest.approx(math.sqrt(math.log(40) / 100))


def test_the_bootstrap_of_a_constant_is_a_point_and_repeats_with_its_seed():
    measure = bootstrap_mean(np.full(40, 0.25), 1)
    assert (measure.value, measure.low, measure.high) == (0.25, 0.25, 0.25)
    values = np.random.default_rng(0).normal(size=200)
    assert bootstrap_mean(values, 3) == bootstrap_mean(values, 3)
    assert bootstrap_mean(values, 3) != bootstrap_mean(values, 4)


def test_the_bootstrap_and_the_normal_interval_meet_where_one_takes_over():
    values = np.random.default_rng(0).exponential(size=LARGE + 1)
    normal, resampled = bootstrap_mean(values, 0), bootstrap_mean(values[:-1], 0)
    assert "normal" in normal.interval and "bootstrap" in resampled.interval
    assert normal.low == pytest.approx(resampled.low, abs=0.01)
    assert normal.high == pytest.approx(resampled.high, abs=0.01)


def test_undefined_resamples_are_left_out():
    low, high = bootstrap(2, lambda drawn: math.nan if drawn.sum() == 1 else 1.0, 0)
    assert (low, high) == (1.0, 1.0)
    assert all(math.isnan(end) for end in bootstrap(2, lambda _: math.nan, 0))


def test_a_measure_is_kept_and_read_back_and_never_infinite():
    measure = Measure(1.0, 0.5, 2.0, "95 %", 7, "note", (0.0, None))
    assert Measure.from_json(json.loads(json.dumps(measure.to_json()))) == measure
    assert measure.clipped(-3.0) == 0 and measure.clipped(9.0) == 9.0
    with pytest.raises(AssertionError):
        Measure(math.inf)
