"""The forgetting quality of the NeurIPS 2023 unlearning challenge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from stable_forgetting.common.audits.base import (
    NOT_NEGATIVE,
    PERCENT,
    AuditInfo,
    Measure,
    Measures,
    Parts,
    PopulationAudit,
)
from stable_forgetting.common.audits.intervals import bootstrap_mean, clopper_pearson
from stable_forgetting.common.audits.populations import PopulationConfig, check, few_models, margins
from stable_forgetting.common.base.numbers import Positive
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.data.parts import utility_parts

UNIT = (0.0, 1.0)


def threshold_counts(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors of every single-threshold attack "phi > t means unlearned", by column.

    Args:
        ours: (N, n) margins of the unlearned models.
        theirs: (M, n) margins of the Retrains.

    Returns:
        (false positives, false negatives): (N + M + 1, n) counts of Retrains above and unlearned
        models at or below each threshold, from minus infinity upwards.  The opposite attack has
        M - FP and N - FN.
    """
    cuts = np.sort(np.concatenate([ours, theirs]), axis=0)
    cuts = np.concatenate([np.full((1, cuts.shape[1]), -np.inf), cuts])
    above = np.stack([(theirs > cut).sum(axis=0) for cut in cuts])
    missed = np.stack([(ours <= cut).sum(axis=0) for cut in cuts])
    return above, missed


def attack_epsilon(fpr: np.ndarray, fnr: np.ndarray, delta: float) -> np.ndarray:
    """Epsilon that each attack shows: max(ln((1-d-FPR)/FNR), ln((1-d-FNR)/FPR)).

    Returns:
        Infinite where both rates are 0; -inf (the attack says nothing) where exactly one is, or
        where a numerator is not positive.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        first = np.where(1 - delta - fpr > 0, np.log((1 - delta - fpr) / fnr), -np.inf)
        second = np.where(1 - delta - fnr > 0, np.log((1 - delta - fnr) / fpr), -np.inf)
    value = np.fmax(first, second)
    value = np.where((fpr == 0) != (fnr == 0), -np.inf, value)
    return np.where((fpr == 0) & (fnr == 0), np.inf, value)


def sample_epsilon(ours: np.ndarray, theirs: np.ndarray, delta: float) -> np.ndarray:
    """(n,) largest epsilon over single-threshold attacks in both directions, at least 0."""
    above, missed = threshold_counts(ours, theirs)
    fpr, fnr = above / len(theirs), missed / len(ours)
    both = [attack_epsilon(fpr, fnr, delta), attack_epsilon(1 - fpr, 1 - fnr, delta)]
    largest: np.ndarray = np.maximum(np.concatenate(both).max(axis=0), 0.0)
    return largest


def shown_epsilon(ours: np.ndarray, theirs: np.ndarray, delta: float) -> np.ndarray:
    """(n,) epsilon that is *shown* at 95 %: both rates at their upper Clopper-Pearson ends.

    Corrected (Bonferroni) for the number of attacks that were tried and for the two rates.
    """
    above, missed = threshold_counts(ours, theirs)
    best = np.zeros(ours.shape[1])
    level = 1 - 0.05 / (2 * 2 * len(above)) * 2  # two-sided confidence with that upper tail
    fp_high = clopper_pearson(np.arange(len(theirs) + 1), len(theirs), level)[1]
    fn_high = clopper_pearson(np.arange(len(ours) + 1), len(ours), level)[1]
    for fp, fn in ((above, missed), (len(theirs) - above, len(ours) - missed)):
        epsilon = attack_epsilon(fp_high[fp], fn_high[fn], delta).max(axis=0)
        best = np.maximum(best, epsilon)
    return best


def epsilon_credit(epsilon: np.ndarray, width: float) -> np.ndarray:
    """H = 2 / 2^n, n = 1 + floor(epsilon / width): 1 in the first bin, 0 at infinity."""
    n = 1 + np.floor(epsilon / width)
    return np.where(np.isinf(epsilon), 0.0, 2.0 * np.exp2(-np.where(np.isinf(n), 0.0, n)))


class EpsilonScore(PopulationAudit):
    """Forgetting quality of the NeurIPS 2023 unlearning challenge, and its final score.

    Formula: per forget sample, over threshold attacks between {phi_U} and {phi_R},
    eps = max_a max(ln((1-d-FPR)/FNR), ln((1-d-FNR)/FPR)); an attack with exactly one rate 0 is
    skipped, both 0 is infinite; H = 2 / 2^n(x), n = bin of eps (width 0.5, from 1); F = mean H;
    score = F (RA_U / RA_R) (TA_U / TA_R), TA the mean over the held-out sets.  ``F shown`` takes of
    each eps only what is shown at 95 % (Clopper-Pearson, Bonferroni over attacks): with few models
    it stays near 1 whatever the method does.  ``separated %``: samples with infinite eps.  With N
    models per side no finite eps exceeds ln(N - 1), so F depends on N.  A variant in circulation
    takes the smaller of the two logarithms and 2^-eps: its numbers do not compare.
    Source: Triantafillou et al. 2024 (arXiv 2406.09073).
    """

    info = AuditInfo(1, "shadows", "1 is best", "1, at the floor")

    class Config(PopulationConfig):
        """Config of the score.

        Attributes:
            delta: delta of the (eps, delta) notion.
            width: Width of a bin of eps.
        """

        delta: Annotated[float, Field(ge=0, lt=1)] = 1e-5
        width: Positive = 0.5

    def compare(
        self, unlearned: Sequence[Parts], retrained: Sequence[Parts], *, seed: int
    ) -> Measures:
        """F, what of it is shown, its score and the median eps on the forget set."""
        check(unlearned, retrained, self.least["fixed"])
        note = few_models(len(unlearned), len(retrained))
        config = self.config
        ours, theirs = (margins(m, "forget", config.clip) for m in (unlearned, retrained))
        epsilon = sample_epsilon(ours, theirs, config.delta)
        credit = epsilon_credit(epsilon, config.width)
        quality = bootstrap_mean(credit, derive(seed, "epsilon"), UNIT)
        shown = epsilon_credit(shown_epsilon(ours, theirs, config.delta), config.width)
        assert quality.value is not None
        n = min(len(ours), len(theirs))
        infinite = float(np.mean(np.isinf(epsilon)))
        return {
            "F": replace(quality, n=n, note=note),
            "F shown": Measure(float(shown.mean()), n=n, bounds=UNIT),
            "score": Measure(
                quality.value * self._utility(unlearned, retrained),
                n=n,
                note=note,
                bounds=NOT_NEGATIVE,
            ),
            "separated %": Measure(100 * infinite, n=n, bounds=PERCENT),
        }

    def _utility(self, unlearned: Sequence[Parts], retrained: Sequence[Parts]) -> float:
        """Ratios of mean accuracies on retain and on what is held out, where scored."""
        ratio = 1.0
        scored = set(unlearned[0]) & set(retrained[0])
        for parts in (scored & {"retain"}, set(utility_parts(scored, self.parts))):
            if not parts:
                continue
            ours, theirs = (
                math.fsum(model[part].accuracy for model in models for part in parts)
                / (len(models) * len(parts))
                for models in (unlearned, retrained)
            )
            ratio *= ours / theirs if theirs else 0.0
        return ratio
