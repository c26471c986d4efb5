"""What a second training of the same row says: of rounding, and of the seed of unlearning."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
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
        """Measures of one row.

        Args:
            own: Seed -> part -> scores of the suite's model.
            twins: The same seeds -> those of its twin.

        Returns:
            Seed -> measures; what belongs to the row as a whole stands at the first seed.

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
    """How much of the spread over seeds is that of unlearning alone.

    A suite's seed draws the forget set, trains Original and unlearns.  Here each Original is
    unlearned a second time with another seed.  Formula: w = mean d^2 / 2 with d the two models'
    difference; b = max(0, variance over seeds of their mean - w / 2); 100 w / (w + b).  An
    accuracy draws nothing when it is measured, so no part is that of evaluation.  The interval is a
    bootstrap over seeds, and rough where they are few.
    Source: components of variance, as in Bouthillier et al. 2021 (arXiv 2103.03098).
    """

    info = AuditInfo(1, "shadows", "%", "none: it says where the spread comes from")
    moved = False

    def compare(self, own: Mapping[int, Parts], twins: Mapping[int, Parts]) -> dict[int, Measures]:
        """The share per accuracy, of the row as a whole."""
        if len(own) < LEAST:
            raise TooFew(f"fewer than {LEAST} seeds with a twin")
        after = self.accuracies(twins)
        shares = {
            head: _share(np.stack([before, after[head]], axis=1))
            for head, before in self.accuracies(own).items()
        }
        return {next(iter(own)): shares}


def _share(pairs: np.ndarray) -> Measure:
    """The share of pairs (n, 2) of values, one pair a seed."""
    value = _within(pairs)
    if value is None:
        return Measure(None, n=len(pairs), note="nothing varies")
    generator = np.random.default_rng(derive(0, "unlearning_seed"))
    drawn = pairs[generator.integers(len(pairs), size=(RESAMPLES, len(pairs)))]
    shares = [share for each in drawn if (share := _within(each)) is not None]
    low, high = np.percentile(shares, [2.5, 97.5])
    return Measure(
        value, float(low), float(high), "95 % bootstrap over seeds", len(pairs), "", PERCENT
    )


def _within(pairs: np.ndarray) -> float | None:
    within = float(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2)) / 2
    between = max(0.0, float(np.var(pairs.mean(axis=1), ddof=1)) - within / 2)
    return 100 * within / (within + between) if within + between else None
