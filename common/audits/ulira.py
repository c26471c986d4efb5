"""The unlearning likelihood-ratio attack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from stable_forgetting.common.audits.base import (
    PERCENT,
    AuditInfo,
    Measure,
    Measures,
    Parts,
    PopulationAudit,
    TooFew,
)
from stable_forgetting.common.audits.intervals import bootstrap
from stable_forgetting.common.audits.populations import ENOUGH, PopulationConfig, check, margins
from stable_forgetting.common.base.seeding import derive
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

    info = AuditInfo(1, "shadows", "%", "50")
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
        ``forget_out`` never seen; every sample is on both sides."""
        ids = np.sort(np.concatenate([models[0][part].indices for part in HALVES]))
        values, member = (np.empty((len(models), len(ids)), dtype=d) for d in (np.float64, bool))
        for row, model in enumerate(models):
            for part in HALVES:
                places = np.searchsorted(ids, model[part].indices)
                values[row, places], member[row, places] = model[part].margin, part == "forget"
        # complementary halves are a group: they take one model from each side of every sample
        first = member[:, :1] == member
        groups = np.unique(first, axis=0, return_inverse=True)[1].reshape(-1)
        values = np.clip(values, -self.config.clip, self.config.clip)
        return self.attack(values, member, groups, seed=seed)

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
