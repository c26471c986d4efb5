"""Many models per side: per-sample distributions of margins over independent trainings.

The models are the units.  With few of them every number here is biased, which is why a row is only
ever read beside Retrain against a second population of Retrains of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from common.audits.base import AuditInfo, Measure, Measures, NotApplicable, Parts, PopulationAudit
from common.audits.intervals import bootstrap, bootstrap_mean, clopper_pearson
from common.config import Strict
from common.errors import DataError
from common.seeding import derive

PARTS = ("forget", "retain", "test")
ENOUGH = 16
"""Models per side below which a note is printed (and U-LiRA pools its variances)."""


class PopulationConfig(Strict):
    """Which parts are compared.

    Attributes:
        parts: Parts of the split; those that were not scored are left out.
        clip: Margins are clipped to [-clip, clip].
    """

    parts: tuple[str, ...] = PARTS
    clip: Annotated[float, Field(gt=0)] = 100.0


def margins(models: Sequence[Parts], part: str, clip: float) -> np.ndarray:
    """(M, n) float64 margins of one part over the models.

    Raises:
        DataError: The models were not scored on the same samples.
    """
    first = models[0][part].indices
    if not all(np.array_equal(model[part].indices, first) for model in models):
        raise DataError(f"part '{part}' of the models holds different samples: one split only")
    values = np.stack([model[part].margin.astype(np.float64) for model in models])
    return np.clip(values, -clip, clip)


def few_models(n_u: int, n_r: int) -> str:
    """A note where there are too few models for the number to stand on its own."""
    smallest = min(n_u, n_r)
    return f"only {smallest} models per side, {ENOUGH} or more wanted" if smallest < ENOUGH else ""


def _check(unlearned: Sequence[Parts], retrained: Sequence[Parts], least: int) -> None:
    if min(len(unlearned), len(retrained)) < least:
        raise NotApplicable(
            f"needs {least} unlearned models and Retrains of one split, found {len(unlearned)} and "
            f"{len(retrained)}: train shadows with --shadows N"
        )


# KLoM ---------------------------------------------------------------------------------------------


def bin_shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(B, n) shares per bin of (M, n) values, by column, with :func:`numpy.histogram`'s rule.

    All bins are half open but the last, which holds its right edge: no sample is dropped.

    Args:
        values: Within the outer edges of their column.
        edges: (B + 1, n) rising edges.
    """
    inside = (values[:, None] >= edges[None, 1:-1]).sum(axis=1)
    return np.stack([(inside == k).mean(axis=0) for k in range(len(edges) - 1)])


def klom_per_sample(
    ours: np.ndarray, theirs: np.ndarray, *, bins: int = 20, floor: float = 1e-5
) -> np.ndarray:
    """(n,) KL(P_U || P_R) of binned margins, in nats.

    Args:
        ours: (N, n) margins of the unlearned models.
        theirs: (M, n) margins of the Retrains.
        bins: Equal bins between the joint smallest and largest value of each sample.
        floor: Smallest share of Retrain where the unlearned models have any.
    """
    low = np.minimum(ours.min(axis=0), theirs.min(axis=0))
    high = np.maximum(ours.max(axis=0), theirs.max(axis=0))
    edges = np.linspace(low, high, bins + 1)
    p, q = bin_shares(ours, edges), np.maximum(bin_shares(theirs, edges), floor)
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) / q), 0.0).sum(axis=0)


class KLoM(PopulationAudit):
    """KL divergence of margins: per sample, the binned margins of many U's against many Retrains.

    Formula: clip phi to [-100, 100]; 20 equal bins on the joint min..max; P = hist U, Q = hist R,
    Q <- max(Q, 1e-5) where P > 0; KLoM(x) = sum P ln(P / Q), U first.  Mean and 95th percentile
    over a part.  Two equal populations of N models still differ by sampling: see the floor.
    ``p``: permutation test at the level of models (is U's membership in the pool special?), on the
    mean over the part; it cannot be below 1 / (resamples + 1).
    Source: Georgiev et al. 2024 (arXiv 2410.23232).
    """

    info = AuditInfo(1, "shadows", "nats")

    class Config(PopulationConfig):
        """Config of KLoM.

        Attributes:
            bins: Bins per sample.
            floor: Smallest share of Retrain where U has any.
            permutations: Relabellings of the models behind ``p``.
        """

        bins: Annotated[int, Field(ge=2)] = 20
        floor: Annotated[float, Field(gt=0)] = 1e-5
        permutations: Annotated[int, Field(ge=1)] = 99

    def compare(
        self, unlearned: Sequence[Parts], retrained: Sequence[Parts], *, seed: int
    ) -> Measures:
        """Mean (bootstrap over samples), 95th percentile and p per part."""
        _check(unlearned, retrained, 2)
        note = few_models(len(unlearned), len(retrained))
        measures: Measures = {}
        for part in self.config.parts:
            if part not in unlearned[0] or part not in retrained[0]:
                continue
            ours, theirs = (margins(m, part, self.config.clip) for m in (unlearned, retrained))
            values = self._values(ours, theirs)
            stream = derive(seed, "klom", part)
            mean = bootstrap_mean(values, stream)
            measures[part] = Measure(
                mean.value, mean.low, mean.high, mean.interval, len(ours), note or mean.note
            )
            measures[f"{part} p95"] = Measure(float(np.percentile(values, 95)), n=len(ours))
            measures[f"{part} p"] = self._permutation(ours, theirs, float(values.mean()), stream)
        return measures

    def _values(self, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        return klom_per_sample(ours, theirs, bins=self.config.bins, floor=self.config.floor)

    def _permutation(
        self, ours: np.ndarray, theirs: np.ndarray, found: float, seed: int
    ) -> Measure:
        generator = np.random.default_rng(derive(seed, "permutations"))
        pool = np.concatenate([ours, theirs])
        as_large = 0
        for _ in range(self.config.permutations):
            order = generator.permutation(len(pool))
            mean = self._values(pool[order[: len(ours)]], pool[order[len(ours) :]]).mean()
            as_large += bool(mean >= found - 1e-12)
        p = (1 + as_large) / (1 + self.config.permutations)
        return Measure(p, n=len(pool), note="permutation over models")


# NeurIPS 2023 -------------------------------------------------------------------------------------


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
    return np.maximum(np.concatenate(both).max(axis=0), 0.0)


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
        found = attack_epsilon(fp_high[fp], fn_high[fn], delta).max(axis=0)
        best = np.maximum(best, found)
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
    score = F (RA_U / RA_R) (TA_U / TA_R).  ``F shown`` takes of each eps only what is shown at 95 %
    (Clopper-Pearson, Bonferroni over attacks): with few models it stays near 1 whatever the method
    does.  With N models per side no finite eps exceeds ln(N - 1), so F depends on N.  A variant in
    circulation takes the smaller of the two logarithms and 2^-eps: its numbers do not compare.
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
        width: Annotated[float, Field(gt=0)] = 0.5

    def compare(
        self, unlearned: Sequence[Parts], retrained: Sequence[Parts], *, seed: int
    ) -> Measures:
        """F, what of it is shown, its score and the median eps on the forget set."""
        _check(unlearned, retrained, 2)
        note = few_models(len(unlearned), len(retrained))
        config = self.config
        ours, theirs = (margins(m, "forget", config.clip) for m in (unlearned, retrained))
        epsilon = sample_epsilon(ours, theirs, config.delta)
        credit = epsilon_credit(epsilon, config.width)
        quality = bootstrap_mean(credit, derive(seed, "epsilon"))
        shown = epsilon_credit(shown_epsilon(ours, theirs, config.delta), config.width)
        assert quality.value is not None
        n = min(len(ours), len(theirs))
        infinite = float(np.mean(np.isinf(epsilon)))
        return {
            "F": Measure(quality.value, quality.low, quality.high, quality.interval, n, note),
            "F shown": Measure(float(shown.mean()), n=n, note="upper bound at 95 % per sample"),
            "score": Measure(quality.value * _utility(unlearned, retrained), n=n, note=note),
            "share infinite": Measure(100 * infinite, n=n, note="% of samples fully separated"),
        }


def _utility(unlearned: Sequence[Parts], retrained: Sequence[Parts]) -> float:
    ratio = 1.0
    for part in ("retain", "test"):
        ours, theirs = (
            math.fsum(model[part].accuracy for model in models) / len(models)
            for models in (unlearned, retrained)
        )
        ratio *= ours / theirs if theirs else 0.0
    return ratio


# U-LiRA -------------------------------------------------------------------------------------------


def ulira_scores(values: np.ndarray, member: np.ndarray, *, pooled: bool) -> np.ndarray:
    """(M, n) log-likelihood ratio "trained and unlearned" over "never trained", leave-one-out.

    Args:
        values: (M, n) margins.
        member: (M, n) True where the model was trained on the sample and unlearned it.
        pooled: One variance per side over all samples, for few models; else one per sample.

    Returns:
        Each entry from Gaussians fitted without that model; NaN where a side would have none
        left (or, unpooled, fewer than two).
    """
    result = np.empty_like(values)
    for j in range(len(values)):
        others = np.arange(len(values)) != j
        sides = [
            _gaussian(values[others], member[others] == flag, pooled) for flag in (True, False)
        ]
        (mu_u, var_u), (mu_o, var_o) = sides
        result[j] = _log_normal(values[j], mu_u, var_u) - _log_normal(values[j], mu_o, var_o)
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
            variance = np.where(counts > 0, squares[counts > 0].sum() / free, np.nan)
        else:
            variance = np.where(counts > 1, squares / (counts - 1), np.nan)
    return np.where(counts > 0, mean, np.nan), variance


def _log_normal(x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Gaussian log density; the variance is floored so that constant margins stay finite."""
    safe = np.maximum(variance, 1e-6)
    return -0.5 * (np.log(2 * np.pi * safe) + (x - mean) ** 2 / safe)


def balanced_accuracy(called: np.ndarray, member: np.ndarray, known: np.ndarray) -> float:
    """Percent; NaN if one side is empty."""
    yes, no = member & known, ~member & known
    if not yes.any() or not no.any():
        return math.nan
    return 50.0 * float(called[yes].mean() + (~called[no]).mean())


class ULira(PopulationAudit):
    """U-LiRA on margins: was this sample trained on and unlearned, or never seen?

    Formula: per sample x, Gaussians N(mu_u, s_u^2) of phi over models that trained on x and
    unlearned it and N(mu_o, s_o^2) over models that never saw x, both without the model under
    attack; score = N(phi; u) / (N(phi; u) + N(phi; o)).  Balanced accuracy (50 ideal), AUC,
    TPR at 1 and 0.1 % FPR pooled over models and samples, and the share of samples with accuracy
    above 60 %.  Below 16 models per side the variances are pooled over samples.  Margins, not 0/1
    correctness, whose variance is 0 as soon as all models agree.
    Source: Hayes et al. 2024 (arXiv 2403.01218); margins as in LiRA, Carlini et al. 2022.
    """

    info = AuditInfo(1, "shadows", "%", "50")
    Config = PopulationConfig

    def compare(
        self, unlearned: Sequence[Parts], retrained: Sequence[Parts], *, seed: int
    ) -> Measures:
        """One forget set for all models: the unlearned against the Retrains."""
        _check(unlearned, retrained, 2)
        ours, theirs = (
            margins(models, "forget", self.config.clip) for models in (unlearned, retrained)
        )
        values = np.concatenate([ours, theirs])
        member = np.repeat([True, False], [len(ours), len(theirs)])[:, None]
        return self.attack(values, np.broadcast_to(member, values.shape), seed=seed)

    def halves(self, models: Sequence[Parts], *, seed: int) -> Measures:
        """A random half of the forget set per model: ``forget`` was trained on and unlearned,
        ``forget_out`` never seen; every sample is on both sides."""
        ids = np.sort(np.concatenate([models[0][part].indices for part in HALVES]))
        values, member = (np.empty((len(models), len(ids)), dtype=d) for d in (np.float64, bool))
        for row, model in enumerate(models):
            for part in HALVES:
                places = np.searchsorted(ids, model[part].indices)
                values[row, places], member[row, places] = model[part].margin, part == "forget"
        return self.attack(np.clip(values, -self.config.clip, self.config.clip), member, seed=seed)

    def attack(self, values: np.ndarray, member: np.ndarray, *, seed: int) -> Measures:
        """All measures of (M, n) margins with their (M, n) membership."""
        per_side = float(np.minimum(member.sum(axis=0), (~member).sum(axis=0)).mean())
        pooled = per_side < ENOUGH
        ratio = ulira_scores(values, member, pooled=pooled)
        known, called = np.isfinite(ratio), ratio > 0
        if not (known & member).any() or not (known & ~member).any():
            raise NotApplicable(f"{len(values)} models leave a side without a distribution")
        note = f"only {per_side:.0f} models per side, variances pooled" if pooled else ""
        low, high = self._interval(called, member, known, seed)
        n = len(values)
        measures = {
            "b.acc": Measure(
                balanced_accuracy(called, member, known),
                low,
                high,
                "95 % bootstrap over models",
                n,
                note,
            )
        }
        yes, no = np.sort(ratio[member & known]), np.sort(ratio[~member & known])
        from common.audits.pairs import auc

        measures["AUC"] = Measure(auc(yes, no), n=n, note=note)
        for name, per_mille in (("TPR@1%", 10), ("TPR@0.1%", 1)):
            measures[name] = _tpr(yes, no, per_mille, n)
        correct = np.where(known, called == member, False).sum(axis=0) / known.sum(axis=0)
        measures["acc > 60 %"] = Measure(100.0 * float(np.mean(correct > 0.6)), n=n, note=note)
        return measures

    def _interval(
        self, called: np.ndarray, member: np.ndarray, known: np.ndarray, seed: int
    ) -> tuple[float | None, float | None]:
        """Over whole models, since the samples of one model fall together."""

        def resampled(drawn: np.ndarray) -> float:
            return balanced_accuracy(called[drawn], member[drawn], known[drawn])

        low, high = bootstrap(len(called), resampled, derive(seed, "ulira"))
        return (None, None) if math.isnan(low) else (low, high)


HALVES = ("forget", "forget_out")


def _tpr(yes: np.ndarray, no: np.ndarray, per_mille: int, n: int) -> Measure:
    """Share of ``yes`` above all but ``per_mille`` / 1000 of ``no`` (both sorted), in percent."""
    allowed = len(no) * per_mille // 1000
    if allowed == 0:
        need = 1000 // per_mille
        return Measure(None, n=n, note=f"needs {need} never-seen scores, has {len(no)}")
    return Measure(100.0 * float(np.mean(yes > no[-allowed - 1])), n=n)
