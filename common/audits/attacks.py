"""Attacks on populations of models: U-LiRA, and the NeurIPS 2023 challenge's quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from stable_forgetting.common.audits.base import (
    NOT_NEGATIVE,
    PERCENT,
    AuditInfo,
    Measure,
    Measures,
    NotApplicable,
    Parts,
    PopulationAudit,
    TooFew,
)
from stable_forgetting.common.audits.intervals import bootstrap, bootstrap_mean, clopper_pearson
from stable_forgetting.common.audits.populations import (
    ENOUGH,
    PopulationConfig,
    check,
    few_models,
    margins,
)
from stable_forgetting.common.base.numbers import Positive
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.data.parts import utility_parts
from stable_forgetting.common.measure.scores import auc

HALVES = ("forget", "forget_out")


def ulira_scores(
    values: np.ndarray, member: np.ndarray, groups: np.ndarray, *, pooled: bool
) -> np.ndarray:
    """(M, n) log-likelihood ratio "trained and unlearned" over "never trained".

    Each model is scored by Gaussians fitted without its whole group, which takes one model from
    each side: leaving out the attacked model alone moves its own side's mean away from it, and
    exchangeable sides then score below 50 %.

    Args:
        values: (M, n) margins.
        member: (M, n) True where the model was trained on the sample and unlearned it.
        groups: (M,) which models are left out together.
        pooled: One variance per side over all samples, for few models; else one per sample.

    Returns:
        NaN where a side would have no distribution left.
    """
    result = np.empty_like(values)
    for group in np.unique(groups):
        rest, here = groups != group, groups == group
        sides = [_gaussian(values[rest], member[rest] == flag, pooled) for flag in (True, False)]
        (mu_u, var_u), (mu_o, var_o) = sides
        result[here] = _log_normal(values[here], mu_u, var_u) - _log_normal(
            values[here], mu_o, var_o
        )
    return result


def _gaussian(
    values: np.ndarray, chosen: np.ndarray, pooled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """((n,) means, (n,) variances) of the chosen entries by column; NaN where undefined."""
    counts = chosen.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(chosen, values, 0.0).sum(axis=0) / counts
        squares = np.where(chosen, (values - mean) ** 2, 0.0).sum(axis=0)
        if pooled:
            free = np.maximum(counts - 1, 0).sum()
            shared = squares[counts > 0].sum() / free if free else np.nan
            variance = np.where(counts > 0, shared, np.nan)
        else:
            variance = np.where(counts > 1, squares / (counts - 1), np.nan)
    return np.where(counts > 0, mean, np.nan), variance


def _log_normal(x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Gaussian log density; the variance is floored so that constant margins stay finite."""
    safe = np.maximum(variance, 1e-6)
    density: np.ndarray = -0.5 * (np.log(2 * np.pi * safe) + (x - mean) ** 2 / safe)
    return density


def balanced_accuracy(called: np.ndarray, member: np.ndarray, valid: np.ndarray) -> float:
    """Percent; NaN if one side is empty."""
    yes, no = member & valid, ~member & valid
    if not yes.any() or not no.any():
        return math.nan
    return 50.0 * float(called[yes].mean() + (~called[no]).mean())


class ULira(PopulationAudit):
    """U-LiRA on margins: was this sample trained on and unlearned, or never seen?

    Formula: per sample x, Gaussians N(mu_u, s_u^2) of phi over models that trained on x and
    unlearned it and N(mu_o, s_o^2) over models that never saw x, both without the model under
    attack and its partner on the other side; score = N(phi; u) / (N(phi; u) + N(phi; o)).
    Balanced accuracy (50 ideal), AUC, TPR at 1 and 0.1 % FPR pooled over models and samples, and
    the share of samples with accuracy above 60 %.  Below 16 models per side the variances are
    pooled over samples.  Margins, not 0/1 correctness, whose variance is 0 as soon as all models
    agree.
    Source: Hayes et al. 2024 (arXiv 2403.01218); margins as in LiRA, Carlini et al. 2022.
    """

    info = AuditInfo(2, "shadows", "%", "50")
    Config = PopulationConfig
    least: ClassVar[Mapping[str, int]] = {"fixed": 3, "halves": 6}

    def compare(
        self, unlearned: Sequence[Parts], retrained: Sequence[Parts], *, seed: int
    ) -> Measures:
        """One forget set for all models: the unlearned against the Retrains."""
        check(unlearned, retrained, self.least["fixed"])
        pairs = min(len(unlearned), len(retrained))
        unlearned, retrained = unlearned[:pairs], retrained[:pairs]
        ours, theirs = (
            margins(models, "forget", self.config.clip) for models in (unlearned, retrained)
        )
        values = np.concatenate([ours, theirs])
        member = np.repeat([True, False], [len(ours), len(theirs)])[:, None]
        groups = np.tile(np.arange(pairs), 2)
        return self.attack(values, np.broadcast_to(member, values.shape), groups, seed=seed)

    def halves(self, models: Sequence[Parts], *, seed: int) -> Measures:
        """A random half of the forget set per model: ``forget`` was trained on and unlearned,
        ``forget_out`` never seen; every sample is on both sides.  A model whose complement is not
        there is left out.

        Raises:
            NotApplicable: The models were not scored on the same samples.
        """
        ids = np.sort(np.concatenate([models[0][part].indices for part in HALVES]))
        values, member = (np.empty((len(models), len(ids)), dtype=d) for d in (np.float64, bool))
        for row, model in enumerate(models):
            own = np.sort(np.concatenate([model[part].indices for part in HALVES]))
            if not np.array_equal(own, ids):
                raise NotApplicable("its models hold different samples: unset evaluation.chunks")
            for part in HALVES:
                places = np.searchsorted(ids, model[part].indices)
                values[row, places], member[row, places] = model[part].margin, part == "forget"
        # complementary halves are a group: they take one model from each side of every sample
        first = member[:, :1] == member
        groups = np.unique(first, axis=0, return_inverse=True)[1].reshape(-1)
        whole = np.array([len(np.unique(member[groups == group, 0])) == 2 for group in groups])
        values = np.clip(values, -self.config.clip, self.config.clip)[whole]
        return self.attack(values, member[whole], groups[whole], seed=seed)

    def attack(
        self, values: np.ndarray, member: np.ndarray, groups: np.ndarray, *, seed: int
    ) -> Measures:
        """All measures of (M, n) margins with their (M, n) membership and (M,) groups."""
        per_side = float(np.minimum(member.sum(axis=0), (~member).sum(axis=0)).mean())
        pooled = per_side < ENOUGH
        ratio = ulira_scores(values, member, groups, pooled=pooled)
        valid, called = np.isfinite(ratio), ratio > 0
        if not (valid & member).any() or not (valid & ~member).any():
            raise TooFew(
                f"{len(values)} models leave no distribution once a pair is left out: give "
                "--shadows 3 or more (6 or more halves)"
            )
        note = f"only {per_side:.0f} models per side, variances pooled" if pooled else ""
        low, high = self._interval(called, member, valid, seed)
        n = len(values)
        measures = {
            "b.acc": Measure(
                balanced_accuracy(called, member, valid),
                low,
                high,
                "95 % bootstrap over models",
                n,
                note,
                PERCENT,
            )
        }
        yes, no = np.sort(ratio[member & valid]), np.sort(ratio[~member & valid])
        measures["AUC"] = Measure(auc(yes, no), n=n, note=note, bounds=PERCENT)
        for name, per_mille in (("TPR@1%", 10), ("TPR@0.1%", 1)):
            measures[name] = _tpr(yes, no, per_mille, n)
        correct = np.where(valid, called == member, False).sum(axis=0) / valid.sum(axis=0)
        measures["acc > 60 %"] = Measure(
            100.0 * float(np.mean(correct > 0.6)), n=n, note=note, bounds=PERCENT
        )
        return measures

    def _interval(
        self, called: np.ndarray, member: np.ndarray, valid: np.ndarray, seed: int
    ) -> tuple[float | None, float | None]:
        """Over whole models, since the samples of one model fall together."""

        def resampled(drawn: np.ndarray) -> float:
            return balanced_accuracy(called[drawn], member[drawn], valid[drawn])

        low, high = bootstrap(len(called), resampled, derive(seed, "ulira"))
        return (None, None) if math.isnan(low) else (low, high)


def _tpr(yes: np.ndarray, no: np.ndarray, per_mille: int, n: int) -> Measure:
    """Share of ``yes`` above all but ``per_mille`` / 1000 of ``no`` (both sorted), in percent."""
    allowed = len(no) * per_mille // 1000
    if allowed == 0:
        need = 1000 // per_mille
        return Measure(None, n=n, note=f"needs {need} never-seen scores, has {len(no)}")
    return Measure(100.0 * float(np.mean(yes > no[-allowed - 1])), n=n, bounds=PERCENT)


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
