"""How far a row is from the retrained model, and how sure we are.

Listing and planning import this, so nothing heavy is loaded: no torch, no scikit-learn, and SciPy
only when a quantile or a test is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stable_forgetting.common.measure.metric import GapColumn, Row

_ROUNDING = 1e-9
"""Share of their mean by which equal differences differ."""


def ks_two_sample(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """(statistic, p) of the two-sided Kolmogorov-Smirnov test that both have one distribution.

    Exact for small samples, asymptotic for large ones (SciPy's ``auto``).
    """
    from scipy.stats import ks_2samp

    assert all(map(math.isfinite, first)) and all(map(math.isfinite, second)), "values not finite"
    result = ks_2samp(first, second)
    return float(result.statistic), float(result.pvalue)


def harmonic_mean(values: Sequence[float | None]) -> float | None:
    """Harmonic mean of non-negative values; 0 if one of them is 0, None if one is None."""
    numbers = _complete(values)
    if numbers is None:
        return None
    assert numbers and min(numbers) >= 0, "a harmonic mean takes one or more non-negative values"
    return 0.0 if min(numbers) == 0 else len(numbers) / math.fsum(1 / value for value in numbers)


def _complete(values: Sequence[float | None]) -> list[float] | None:
    numbers = [value for value in values if value is not None]
    return numbers if len(numbers) == len(values) else None


def gap(row: Row, target: Row, metric: str) -> float | None:
    """Signed gap ``row - target`` in the metric's unit; None if either side is unknown."""
    ours, theirs = row.get(metric), target.get(metric)
    return None if ours is None or theirs is None else ours - theirs


def charged_gap(row: Row, target: Row, metric: str, kept: Sequence[str] = ()) -> float | None:
    """What a gap counts for: its size, or of a metric in ``kept`` what is lost and no surplus."""
    signed = gap(row, target, metric)
    if signed is None:
        return None
    return max(0.0, -signed) if metric in kept else abs(signed)


def average_gap(
    row: Row, target: Row, metrics: Sequence[str], kept: Sequence[str] = ()
) -> float | None:
    """AG: mean charged gap to the retrained model over ``metrics``, in percentage points."""
    distances = _complete([charged_gap(row, target, metric, kept) for metric in metrics])
    return None if distances is None else _FORMULAS["mean"](distances)


_FORMULAS: Mapping[str, Callable[[list[float]], float]] = {
    "mean": lambda distances: math.fsum(distances) / len(distances),
    "max": max,
    "tow": lambda distances: math.prod(1 - value / 100 for value in distances),
}
"""Of charged gaps: their mean, the largest, and the tug of war (RUM, Zhao et al., 2024)."""


def derived(
    row: Row, target: Row, column: GapColumn, metrics: Sequence[str], kept: Sequence[str] = ()
) -> float | None:
    """The value of a further column: its formula over its own metrics, or over ``metrics``."""
    own = column.metrics or metrics
    distances = _complete([charged_gap(row, target, metric, kept) for metric in own])
    return None if distances is None else _FORMULAS[column.formula](distances)


def student_central(t: float, dof: int) -> float:
    """P(|T| <= t) of Student's t with a whole number of degrees of freedom, t >= 0.

    The finite sums of Abramowitz & Stegun 26.7.3 and 26.7.4: exact, and at once, where importing
    SciPy would take longer than the whole report.
    """
    theta = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(theta), math.cos(theta)
    term = cosine if dof % 2 else 1.0
    total = term if dof > 1 else 0.0
    for k in range(3 if dof % 2 else 2, dof - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if dof % 2:
        return 2 / math.pi * (theta + sine * total)
    return sine * total


def student_quantile(p: float, dof: int) -> float:
    """The t with P(T <= t) = p, for 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while 0.5 + student_central(high, dof) / 2 < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if 0.5 + student_central(middle, dof) / 2 < p:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Summary:
    """Mean over seeds with its uncertainty; None where one seed cannot tell.

    Attributes:
        std: Sample standard deviation (n - 1 in the denominator).
        low: Lower end of the t-interval of the mean.
        high: Upper end.
    """

    mean: float
    std: float | None
    low: float | None
    high: float | None
    n: int


def summarise(values: Sequence[float], confidence: float = 0.95) -> Summary:
    """Mean, standard deviation and two-sided t-interval of independent values."""
    n = len(values)
    assert n > 0 and 0 < confidence < 1, "one or more values and a confidence in (0, 1)"
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(mean, None, None, None, 1)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = student_quantile(0.5 + confidence / 2, n - 1) * std / math.sqrt(n)
    return Summary(mean, std, mean - half, mean + half, n)


@dataclass(frozen=True)
class Floor:
    """AG between two Retrains that differ in their training seed only: what noise alone costs.

    Attributes:
        per_seed: AG of each pair, None where a value is unknown.
        summary: Over the pairs whose AG is known; None if there are none.
    """

    per_seed: tuple[float | None, ...]
    summary: Summary | None


def retrain_floor(
    first: Sequence[Row], second: Sequence[Row], distance: Callable[[Row, Row], float | None]
) -> Floor:
    """The noise floor of AG: second Retrain against first, seed by seed."""
    ags = tuple(distance(row, target) for row, target in zip(second, first, strict=True))
    measured = [value for value in ags if value is not None]
    return Floor(ags, summarise(measured) if measured else None)


@dataclass(frozen=True)
class PairedDifference:
    """Seed-by-seed difference of two lists.

    Attributes:
        summary: Of the differences, with their 95 % t-interval.
        p_value: Two-sided paired t-test, or sign test where all are equal; None for one seed.
    """

    summary: Summary
    p_value: float | None


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """``first - second``, paired by position.

    Metrics move in steps of a sample, so differences may be equal by chance.  Then no spread is
    known, and p is that of the sign test: 2^(1 - n), or 1 if they are all 0.
    """
    summary = summarise([a - b for a, b in zip(first, second, strict=True)])
    return PairedDifference(summary, _two_sided_p(summary))


def _two_sided_p(summary: Summary) -> float | None:
    if summary.std is None:
        return None
    if summary.std <= _ROUNDING * abs(summary.mean):
        return 1.0 if summary.mean == 0 else 2.0 ** (1 - summary.n)
    t = summary.mean / (summary.std / math.sqrt(summary.n))
    return max(0.0, 1.0 - student_central(abs(t), summary.n - 1))  # the sum may round above 1
