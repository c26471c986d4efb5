"""Verdicts: whether a model differs from a Retrain, as tests that hold at any number of seeds.

On every seed there is a model and K >= 2 Retrains, K + 1 *members*, with a distance between any
two.  A model as good as a Retrain is one more member: which of them it is, is chance.

- **Different**: by how much a member is the odd one out is its :func:`oddness`.  The p-value is
  exact over all (K + 1)^n ways to name one member of each seed the model (:func:`odd_one_out`),
  without any assumption on distributions.  The p-values of a table are corrected by Benjamini and
  Hochberg.  A model that is odd on every seed has p = (K + 1)^-n.
- **Indistinguishable**: an equivalence test, twice.  On averages (the distance of the benchmark's
  rule) and on answers (the distance per sample) the model's distance to both Retrains is to be
  below :data:`MARGIN` times that between them.  Each is a sign test of the median log ratio, which
  is the model's oddness.  The larger p counts, corrected by Holm for the rows of the table.  With n
  seeds it is 2^-n at least: ten seeds carry a table of fifty rows, five seeds a single row.
- Below :data:`LEAST_SEEDS` seeds there is no verdict, and a table has p-values alone.  With three
  seeds all rows that are odd on each share one p, so a row's mark would hang on its neighbours.

This module imports nothing heavier than NumPy: reports read it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

LEVEL = 0.05
MARGIN = math.log(2.0)
LEAST_SEEDS = 5
Key = TypeVar("Key")
Word = Literal["different", "indistinguishable", "undecided", "untested"]
_ENUMERATED = 2**20
_SAMPLED = 2**16
_TIE = 1e-9
_LARGEST = math.log(1e6)
_HALVINGS = 16


@dataclass(frozen=True)
class Evidence:
    """What the verdict on a row rests on.

    Attributes:
        averages: (n, K + 1, K + 1) distances by the benchmark's rule, from the member of the row to
            that of the column; the model's in row 0.
        resolution: The smallest step of that distance: below it a distance says nothing.
        answers: The same distances per sample, averaged over the samples; None where the scores
            that they take are not there.  Then no row is called indistinguishable.
    """

    averages: np.ndarray
    resolution: float
    answers: np.ndarray | None = None


@dataclass(frozen=True)
class Median:
    """A median over seeds, with an interval that holds for any distribution.

    Attributes:
        value: Of the sample.
        low: Above the median of the population with probability :data:`LEVEL` at most; None where
            so few seeds give no such bound.
        high: The same from above.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """Whether a model differs from a Retrain.

    Attributes:
        n: Seeds.
        odd: Seeds on which the model is the odd one out; k members that tie count 1/k each.
        ratio: Log ratio of its distance to the Retrains over that between them, by averages.
        p: Of :func:`odd_one_out`.
        q: p corrected for the rows of the table (Benjamini and Hochberg).
        answers: The log ratio by answers; None where they are not known.
        p_equivalent: Of the equivalence test, corrected for the rows (Holm); None without answers.
        detectable: Of an undecided model the median log oddness from which on these seeds, with the
            row's own spread, would have shown a difference; None where none could.
    """

    n: int
    odd: float
    ratio: Median
    p: float
    q: float
    answers: Median | None
    p_equivalent: float | None
    detectable: float | None

    @property
    def word(self) -> Word:
        """``different`` wins where a table shows both: a small difference is one."""
        if self.n < LEAST_SEEDS:
            return "untested"
        if self.q <= LEVEL + _TIE:
            return "different"
        if self.p_equivalent is not None and self.p_equivalent <= LEVEL + _TIE:
            return "indistinguishable"
        return "undecided"


def oddness(distances: np.ndarray, resolution: float) -> np.ndarray:
    """(n, K + 1): by how much each member of each seed is further away than the others.

    The log of a member's distance to the others, averaged over them, less the same average over
    the pairs that it is not in, both ways; members of a seed add up to 0.  Means of logs are
    geometric, so that a member drawn at random has the expectation 0 whatever the distribution.

    Args:
        distances: (n, K + 1, K + 1), not negative; K >= 2.  Those to and from a member need not be
            equal: a rule may charge what one lost against the other alone.
        resolution: Added to each: the smallest step, below which a distance says nothing.
    """
    count = distances.shape[-1]
    assert count >= 3 and resolution > 0, "two or more Retrains and a positive resolution"
    logs = np.log(distances + resolution) * ~np.eye(count, dtype=bool)
    own = logs.sum(-1)
    others = (own.sum(-1, keepdims=True) - own - logs.sum(-2)) / 2
    return np.asarray(own / (count - 1) - others / ((count - 1) * (count - 2) / 2))


def odd_one_out(scores: np.ndarray) -> float:
    """P of the null hypothesis that the model is one more Retrain; ties need no care.

    The share of all ways to name one member of each seed the model whose mean oddness is at least
    the model's.  Exact by enumeration, in two halves, of up to 2^20 ways each; by a fixed draw of
    2^16 ways, the model's own among them, beyond.
    """
    n, count = scores.shape
    least = float(scores[:, 0].sum()) - _TIE * max(1.0, float(np.abs(scores).sum()))
    if count ** ((n + 1) // 2) > _ENUMERATED:
        named = np.random.default_rng(0).integers(count, size=(_SAMPLED - 1, n))
        sums = scores[np.arange(n), named].sum(1)
        return float((1 + np.count_nonzero(sums >= least)) / _SAMPLED)
    first, second = np.sort(_sums(scores[: n // 2])), np.sort(_sums(scores[n // 2 :]))
    below = np.searchsorted(second, least - first, side="left")
    return float((len(second) - below).sum() / (len(first) * len(second)))


def _sums(scores: np.ndarray) -> np.ndarray:
    """All sums of one entry per row."""
    sums = np.zeros(1)
    for row in scores:
        sums = np.add.outer(sums, row).ravel()
    return sums


def odd_seeds(scores: np.ndarray) -> float:
    """On how many seeds the model is the odd one out; k members that tie count 1/k each."""
    largest = scores >= scores.max(1, keepdims=True) - _TIE
    return float((largest[:, 0] / largest.sum(1)).sum())


def median(values: Sequence[float]) -> Median:
    """The median of independent values, between two order statistics.

    Fewer than k of n values lie below the population's median with a probability that the binomial
    distribution gives; each bound is the innermost value that errs with :data:`LEVEL` at most.
    """
    ordered, n = sorted(values), len(values)
    outer = 0
    while sum(math.comb(n, k) for k in range(outer + 1)) <= LEVEL * 2**n:
        outer += 1
    low, high = (ordered[outer - 1], ordered[n - outer]) if outer else (None, None)
    return Median(statistics.median(ordered), low, high)


def benjamini_hochberg(p: Sequence[float]) -> np.ndarray:
    """P-values corrected for their number: what holds a false discovery rate at a level.

    Source: Benjamini and Hochberg 1995.  Valid where tests are independent or, as those of rows
    that share their Retrains, positively dependent.
    """
    order = np.argsort(p)
    steps = np.asarray(p)[order] * len(p) / np.arange(1, len(p) + 1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum.accumulate(steps[::-1])[::-1]
    return corrected


def sign_test(ratios: np.ndarray) -> float:
    """P that so many of n log ratios lie below :data:`MARGIN` if their median does not."""
    n, below = len(ratios), int((ratios < MARGIN).sum())
    return float(sum(math.comb(n, k) for k in range(below, n + 1)) / 2**n)


def holm(p: Sequence[float]) -> np.ndarray:
    """P-values corrected for their number: the chance of any false one stays below the level.

    Source: Holm 1979.  Valid however the tests depend on each other.
    """
    order = np.argsort(p)
    steps = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected


def holm_by_key(p: Mapping[Key, float | None]) -> dict[Key, float]:
    """P-values of tests that are read together, by their keys, corrected by :func:`holm`.

    Those that are None were not tested, and are neither counted nor in the result.
    """
    tested = {key: value for key, value in p.items() if value is not None}
    return dict(zip(tested, holm([*tested.values()]).tolist(), strict=True))


def judge(rows: Mapping[str, Evidence]) -> dict[str, Verdict]:
    """The verdicts of a table's rows, corrected for how many they are."""
    scores = {label: oddness(row.averages, row.resolution) for label, row in rows.items()}
    answers = {
        label: oddness(row.answers, _TIE)[:, 0]  # a mean over samples has no smallest step
        for label, row in rows.items()
        if row.answers is not None
    }
    p = {label: odd_one_out(score) for label, score in scores.items()}
    q = dict(zip(p, benjamini_hochberg([*p.values()]).tolist(), strict=True))
    equivalent = {
        label: max(sign_test(scores[label][:, 0]), sign_test(ratios))
        for label, ratios in answers.items()
    }
    p_equivalent = holm_by_key(equivalent)
    verdicts = {}
    for label, row in rows.items():
        verdict = Verdict(
            n=len(row.averages),
            odd=odd_seeds(scores[label]),
            ratio=median(scores[label][:, 0].tolist()),
            p=p[label],
            q=q[label],
            answers=median(answers[label].tolist()) if label in answers else None,
            p_equivalent=p_equivalent.get(label),
            detectable=None,
        )
        if verdict.word == "undecided":
            allowed = _allowed([p[other] for other in p if other != label])
            verdict = replace(verdict, detectable=_detectable(scores[label], allowed))
        verdicts[label] = verdict
    return verdicts


def _allowed(others: list[float]) -> float:
    """The largest p with which one more row of a table would differ, given the others'."""
    below = np.sort(others)
    steps = LEVEL * np.arange(len(others) + 1, 0, -1) / (len(others) + 1)
    counts = np.searchsorted(below, steps + _TIE, side="right")
    return float(steps[counts >= np.arange(len(others), -1, -1)][0])


def _detectable(scores: np.ndarray, allowed: float) -> float | None:
    """The median log ratio at which the row's p would be ``allowed``; None where it cannot be."""
    low, high = -_LARGEST, _LARGEST
    if odd_one_out(_moved(scores, high)) > allowed + _TIE:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if odd_one_out(_moved(scores, middle)) > allowed + _TIE:
            low = middle
        else:
            high = middle
    return float(np.median(scores[:, 0])) + high


def _moved(scores: np.ndarray, by: float) -> np.ndarray:
    """The oddness of all members if the log of the model's every distance were larger ``by``."""
    others = scores.shape[1] - 1
    step = np.full(scores.shape[1], -by / others)
    step[0] = by
    return np.asarray(scores + step)
