"""Error rates and power of the verdicts, by simulation: nominal or below, better with more seeds.

Models are points with one coordinate per metric; distances are mean absolute differences, as AG's
are.  A model as good as a Retrain is drawn as the Retrains are; a worse one lies ``shift`` aside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel

from stable_forgetting.benchmarks.machine.glossary import CHOSEN, SIMULATED
from stable_forgetting.common.measure.gaps import paired_difference
from stable_forgetting.common.measure.verdict import (
    LEVEL,
    MARGIN,
    Evidence,
    benjamini_hochberg,
    holm,
    judge,
    odd_one_out,
    oddness,
    sign_test,
)

SEEDS = {3: 400, 5: 400, 10: 400, 20: 40}
"""Seeds per table -> rows to simulate: the exact p of 20 seeds takes its time."""
NOISES: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape),
    "heavy": lambda rng, shape: rng.standard_t(3, size=shape),
    "ties": lambda rng, shape: np.round(rng.normal(size=shape)),
    "uneven splits": lambda rng, shape: (
        rng.normal(size=shape) * rng.lognormal(size=(*shape[:1], 1, 1))
    ),
}


def drawn(
    noise: str, rows: int, n: int, shift: float = 0.0, retrains: int = 2, metrics: int = 4
) -> np.ndarray:
    """(rows, n, K + 1) oddness; every row has Retrains of its own."""
    rng = np.random.default_rng(n)
    points = NOISES[noise](rng, (rows * n, retrains + 1, metrics))
    points[:, 0] += shift
    return scored(points).reshape(rows, n, -1)


def table(rng: np.random.Generator, n: int, shifts: np.ndarray, *, share: bool) -> np.ndarray:
    """(rows, n, 3) oddness of one table; the rows share their Retrains or do not."""
    retrains = rng.exponential(size=(1 if share else len(shifts), n, 2, 4))
    retrains = np.broadcast_to(retrains, (len(shifts), n, 2, 4))
    models = rng.exponential(size=(len(shifts), n, 1, 4)) + shifts[:, None, None, None]
    return scored(np.concatenate([models, retrains], axis=2))


def apart(points: np.ndarray) -> np.ndarray:
    """(..., K + 1, K + 1) distances of points (..., K + 1, metrics)."""
    return np.abs(points[..., :, None, :] - points[..., None, :, :]).mean(-1)


def scored(points: np.ndarray) -> np.ndarray:
    """(..., K + 1) oddness of points (..., K + 1, metrics)."""
    return oddness(apart(points), 0.05)


def words(n: int, rows: int, tables: int, shifts: tuple[float, float]) -> list[list[str]]:
    """Verdicts of simulated tables whose rows share their Retrains.

    Args:
        n: Seeds.
        rows: Of a table.
        tables: How many.
        shifts: By how much each row lies aside in its averages and in its answers.
    """
    rng, made = np.random.default_rng(n), []
    for _ in range(tables):
        shared = rng.exponential(size=(2, 1, n, 2, 4))
        points = [
            np.concatenate(
                [rng.exponential(size=(rows, n, 1, 4)) + shift, np.repeat(pair, rows, axis=0)], 2
            )
            for shift, pair in zip(shifts, shared, strict=True)
        ]
        averages, answers = map(apart, points)
        table = {str(k): Evidence(averages[k], 0.05, answers[k]) for k in range(rows)}
        made.append([verdict.word for verdict in judge(table).values()])
    return made


def share(tables: list[list[str]], word: str) -> float:
    """Of all rows, how many have a verdict."""
    return float(np.mean([row == word for table in tables for row in table]))


def at_most(rate: float, trials: int) -> float:
    """Four standard errors above a rate: more is not chance."""
    return rate + 4 * math.sqrt(rate * (1 - rate) / trials)


def different(rows: np.ndarray) -> float:
    """Share of rows whose own p is at most the level."""
    return float(np.mean([odd_one_out(scores) <= LEVEL for scores in rows]))


def shown_near(ratios: np.ndarray) -> float:
    """Share of rows (rows, n) whose log ratio is shown to be below the margin."""
    return float(np.mean([sign_test(row) <= LEVEL for row in ratios]))


@pytest.mark.parametrize("noise", NOISES)
def test_a_model_as_good_as_a_retrain_is_rarely_different(noise):
    for n, rows in SEEDS.items():
        assert different(drawn(noise, rows, n)) <= at_most(LEVEL, rows), n
        assert different(drawn(noise, rows, n, metrics=1)) <= at_most(LEVEL, rows), n
    assert different(drawn(noise, 400, 4, retrains=3)) <= at_most(LEVEL, 400), "a rank among four"


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("shift", [0.0, 1.5])
@pytest.mark.parametrize("metrics", [1, 4])
def test_a_model_at_the_margin_is_rarely_indistinguishable(noise, shift, metrics):
    """The worst case of the equivalence test: the median log ratio is the margin itself."""
    for n in SEEDS:
        ratios = drawn(noise, 2000, n, shift, metrics=metrics)[:, :, 0]
        at_margin = ratios - np.median(ratios) + MARGIN
        assert shown_near(at_margin) <= at_most(LEVEL, 2000), n
        assert shown_near(at_margin + 0.3) <= shown_near(at_margin), "further is rarer"


@pytest.mark.parametrize("share", [True, False], ids=["shared Retrains", "independent Retrains"])
def test_few_rows_of_a_table_are_called_different_by_mistake(share):
    """The false discovery rate with half of the rows, or all, as good as a Retrain."""
    powers = []
    for n, tables in {3: 150, 5: 150, 10: 60}.items():
        for worse in (0, 8):
            rng, shifts = np.random.default_rng(n), np.array([2.0] * worse + [0.0] * (16 - worse))
            false, right = [], []
            for _ in range(tables):
                p = [odd_one_out(scores) for scores in table(rng, n, shifts, share=share)]
                marked = benjamini_hochberg(p) <= LEVEL
                false.append(marked[worse:].sum() / max(1, marked.sum()))
                right.append(marked[:worse].mean() if worse else 0.0)
            assert np.mean(false) <= at_most(LEVEL, tables), (n, worse)
        powers.append(np.mean(right))
    assert powers == sorted(powers) and powers[2] > 0.9, powers


def test_more_seeds_tell_more_of_the_models_that_are_worse():
    for noise in NOISES:
        power = [different(drawn(noise, rows, n, 1.5)) for n, rows in SEEDS.items()]
        assert power == sorted(power) and power[-1] > 0.6, (noise, power)


def test_more_seeds_show_more_of_the_models_that_are_as_good():
    for noise in NOISES:
        power = [shown_near(drawn(noise, 1000, n)[:, :, 0]) for n in SEEDS]
        assert power == sorted(power) and power[0] == 0, (noise, power)
        assert power[1] > 0.5 and power[-1] > 0.95, (noise, power)


def test_sizes_tell_more_than_how_often_a_model_is_odd():
    """Why the p-value is not the binomial one of the seeds on which a model is odd."""
    from scipy.stats import binom

    for n in (5, 10):
        rows = drawn("skewed", 600, n, 1.0)
        odd = (rows.argmax(-1) == 0).sum(1)
        counted = float(np.mean(binom.sf(odd - 1, n, 1 / 3) <= LEVEL))
        assert different(rows) > counted + 0.05, n


def test_more_seeds_would_have_shown_smaller_gaps():
    gaps = []
    for n in (5, 13):
        points = NOISES["skewed"](np.random.default_rng(n), (60, n, 3, 1))
        points[:, :, 0] += 0.5
        rows = [judge({"row": Evidence(apart(row), 0.05)})["row"] for row in points]
        gaps.append(np.mean([row.detectable for row in rows if row.detectable is not None]))
    assert 0 < gaps[1] < 0.7 * gaps[0], gaps


@pytest.mark.parametrize("aside", [(3.0, 0.0), (0.0, 3.0)], ids=["averages", "answers"])
def test_no_row_of_a_table_is_called_indistinguishable_by_mistake(aside):
    """Rows that lie far in one of both ways: with shared Retrains, any false mark in a table."""
    for n, tables in {5: 100, 10: 100}.items():
        false = np.mean(["indistinguishable" in table for table in words(n, 16, tables, aside)])
        assert false <= at_most(LEVEL, tables), (n, false)


def test_power_of_a_table_grows_with_its_seeds():
    """What docs/metrics.md prints: 16 rows, n seeds; as good as a Retrain, and far from one."""
    good = {n: words(n, 16, 40, (0.0, 0.0)) for n in (3, 5, 10)}
    far = {n: words(n, 16, 40, (3.0, 3.0)) for n in (3, 5, 10)}
    assert share(good[3], "untested") == share(far[3], "untested") == 1
    assert share(good[5], "indistinguishable") == 0 < share(good[10], "indistinguishable")
    assert share(far[5], "different") > 0.9 and share(far[10], "different") > 0.99
    assert share(good[10], "different") <= at_most(LEVEL, 40)
    for n, *printed in SIMULATED:
        found = (
            share(good[n], "different"),
            share(good[n], "indistinguishable"),
            share(far[n], "different"),
        )
        assert [100 * value for value in found] == pytest.approx([*map(float, printed)], abs=4)


def test_pairing_holds_its_level_and_a_choice_by_the_data_does_not():
    """What docs/metrics.md says of comparisons of two rows; Welch's test where they go apart."""
    stream, tables, chosen = np.random.default_rng(5), 20_000, []
    for n in (3, 5, 10):
        for rho in (-0.5, 0.0, 0.5):
            a, noise = stream.standard_normal((2, tables, n))
            b = rho * a + np.sqrt(1 - rho**2) * noise
            paired = ttest_rel(a, b, axis=1).pvalue
            apart_p = ttest_ind(a, b, axis=1, equal_var=False).pvalue
            together = (
                np.sum((a - a.mean(1, keepdims=True)) * (b - b.mean(1, keepdims=True)), 1) > 0
            )
            assert np.mean(paired < LEVEL) == pytest.approx(LEVEL, abs=0.006), (n, rho)
            if rho <= 0:
                chosen.append(100 * np.mean(np.where(together, paired, apart_p) < LEVEL))
    assert [round(min(chosen)), round(max(chosen))] == [*map(int, CHOSEN)]
    few = [paired_difference(*pair).p_value for pair in zip(a[:20], b[:20], strict=True)]
    assert few == pytest.approx(paired[:20].tolist())


@pytest.mark.parametrize("n", [2, 3, 5])
def test_equal_rows_that_move_in_steps_are_rarely_told_apart(n):
    """Twenty pairs, corrected: equal differences by chance are no proof, however often they are."""
    stream, tables = np.random.default_rng(n), 60
    moves = 100 / 360 / 4 * np.abs(stream.integers(-2, 3, (2, tables, 20, n)))
    found = [
        any(holm([paired_difference(*pair).p_value for pair in zip(*pairs, strict=True)]) <= LEVEL)
        for pairs in zip(*moves, strict=True)
    ]
    assert np.mean(found) <= at_most(LEVEL, tables)
