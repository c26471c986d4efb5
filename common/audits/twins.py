"""What a second training of the same row says: of rounding, and of the seeds of its spread."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from stable_forgetting.common.audits.base import (
    PERCENT,
    Audit,
    AuditInfo,
    Measure,
    Measures,
    Parts,
    TooFew,
    accuracy_heads,
)
from stable_forgetting.common.audits.intervals import proportion
from stable_forgetting.common.base.seeding import derive

LEAST = 3
"""Seeds from which a spread over seeds is compared with anything."""
RESAMPLES = 2000
EVALUATIONS = 3
"""Seeds with which the scores of one model are evaluated."""
MARK = "rounding moves it more than the seeds do: another machine may give another row"


class Twins(Audit):
    """Compares each model of a row with its twin: the row again, from the same Original.

    Attributes:
        moved: Whether the twin starts from weights moved by their last digit, with the same seed;
            else it has another seed of unlearning.
    """

    moved: ClassVar[bool]

    @abstractmethod
    def compare(self, own: Mapping[int, Parts], twins: Mapping[int, Parts]) -> dict[int, Measures]:
        """Seed -> measures of one row; what belongs to the row as a whole is at the first seed.

        Args:
            own: Seed -> part -> scores of the suite's model.
            twins: The same seeds -> those of its twin.

        Raises:
            TooFew: There are too few seeds.
        """

    def accuracies(self, models: Mapping[int, Parts]) -> dict[str, list[float]]:
        """Head -> accuracy of every model, percent."""
        heads = accuracy_heads(next(iter(models.values()), {}), self.parts)
        return {h: [parts[p].accuracy for parts in models.values()] for p, h in heads.items()}


class Rounding(Twins):
    """The spread that a machine gives: the same training, from weights moved by their last digit.

    Another processor, or another number of threads, rounds sums otherwise.  Here every weight of
    the start moves to a neighbouring number of its type, up or down at random, and the row is
    trained again with the same seed.  Formula: |accuracy - accuracy of the twin|; marked where
    their root mean square over sqrt 2 is above the standard deviation over seeds.
    Source: one-bit changes, Summers and Dinneen 2021 (arXiv 2103.04514); the mark is ours.
    """

    info = AuditInfo(1, "shadows", "points", "0: nothing moves")
    moved = True

    def compare(self, own: Mapping[int, Parts], twins: Mapping[int, Parts]) -> dict[int, Measures]:
        """How far each accuracy moves, and the share of forgotten samples answered otherwise."""
        cells: dict[int, Measures] = {seed: {} for seed in own}
        after = self.accuracies(twins)
        for head, before in self.accuracies(own).items():
            moved = np.abs(np.subtract(after[head], before))
            machine = math.sqrt(float(np.mean(moved**2)) / 2)
            marked = len(moved) >= LEAST and machine > float(np.std(before, ddof=1))
            for seed, value in zip(own, moved, strict=True):
                cells[seed][head] = Measure(float(value), note=MARK if marked else "")
        for seed, parts in own.items():
            one, two = parts["forget"].probs, twins[seed]["forget"].probs
            if one is not None and two is not None:
                cells[seed]["answers"] = proportion(one.argmax(axis=1) != two.argmax(axis=1))
        return cells


class UnlearningSeed(Twins):
    """How much of the spread over seeds is that of unlearning alone, and how much of evaluation.

    A suite's seed draws the forget set, trains Original and unlearns.  Here each Original is
    unlearned a second time with another seed, and the scores of each model are evaluated with
    :data:`EVALUATIONS` seeds.  An accuracy draws nothing when it is measured; an attack on
    membership draws the samples that it learns from.  Formula: with v the variance over k
    evaluations and d the difference of the two models' means over them, e = mean v,
    u = max(0, mean d^2 / 2 - e / k), s = max(0, variance of the seeds' means - u / 2 - e / 2k);
    100 u / (e + u + s) and 100 e / (e + u + s).  The intervals are a bootstrap over seeds, and
    rough where they are few.
    Source: components of variance, as in Bouthillier et al. 2021 (arXiv 2103.03098).

    Attributes:
        evaluate: (scores of a model, seed of the draws) -> metrics that draw, by name.
        titles: Name of a metric -> its head.
    """

    info = AuditInfo(2, "shadows", "%", "none: it says where the spread comes from")
    moved = False
    evaluate: Callable[[Parts, int], Mapping[str, float | None]] | None = None
    titles: Mapping[str, str] = {}

    def compare(self, own: Mapping[int, Parts], twins: Mapping[int, Parts]) -> dict[int, Measures]:
        """The shares per accuracy, and per metric that draws, of the row as a whole."""
        if len(own) < LEAST:
            raise TooFew(f"fewer than {LEAST} seeds with a twin")
        after = self.accuracies(twins)
        shares = {
            head: _share(np.stack([before, after[head]], axis=1)[..., None], 1)
            for head, before in self.accuracies(own).items()
        }
        for head, values in self._drawn(own, twins).items():
            shares[head] = _share(values, 1)
            shares[f"{head}, evaluation"] = _share(values, 2)
        return {next(iter(own)): shares}

    def _drawn(self, own: Mapping[int, Parts], twins: Mapping[int, Parts]) -> dict[str, np.ndarray]:
        """Head -> (n, 2, k) values of metrics that depend on the evaluation's seed."""
        if self.evaluate is None:
            return {}
        found = []  # (n, 2, k) metrics
        for seed in own:
            seeds = [derive(seed, "evaluation", number) for number in range(EVALUATIONS)]
            both = own[seed], twins[seed]
            found.append([[self.evaluate(parts, each) for each in seeds] for parts in both])
        drawn = {}
        for name, title in self.titles.items():
            values = np.array([[[m.get(name) for m in k] for k in pair] for pair in found], float)
            if np.isfinite(values).all() and (values != values[..., :1]).any():
                drawn[title] = values
        return drawn


def _share(values: np.ndarray, place: int) -> Measure:
    """One component of (n, 2, k) values, of the seeds, of unlearning and of the evaluation."""
    whole = _components(values)
    if whole is None:
        return Measure(None, n=len(values), note="nothing varies")
    generator = np.random.default_rng(derive(0, "unlearning_seed"))
    drawn = values[generator.integers(len(values), size=(RESAMPLES, len(values)))]
    shares = [parts[place] for each in drawn if (parts := _components(each)) is not None]
    low, high = np.percentile(shares, [2.5, 97.5])
    return Measure(
        whole[place], float(low), float(high), "95 % bootstrap over seeds", len(values), "", PERCENT
    )


def _components(values: np.ndarray) -> tuple[float, float, float] | None:
    """(of the seeds, of unlearning, of the evaluation) in percent; None where nothing varies."""
    means, count = values.mean(axis=2), values.shape[2]
    drawn = float(np.mean(np.var(values, axis=2, ddof=1))) if count > 1 else 0.0
    unlearned = float(np.mean((means[:, 0] - means[:, 1]) ** 2)) / 2
    unlearned = max(0.0, unlearned - drawn / count)
    rest = float(np.var(means.mean(axis=1), ddof=1)) - unlearned / 2 - drawn / (2 * count)
    seeds = max(0.0, rest)
    whole = seeds + unlearned + drawn
    if not whole:
        return None
    return 100 * seeds / whole, 100 * unlearned / whole, 100 * drawn / whole
