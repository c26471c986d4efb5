"""Many models per side: per-sample distributions of margins over independent trainings.

The models are the units.  With few of them every number here is biased, which is why a row is only
ever read beside Retrain against a second population of Retrains of the same size.

The margin of an answer of many tokens is the mean of its tokens' margins log p - log(1 - p).  Not
the margin of the whole answer's probability: that is so small that its margin is the sum of log p,
whose spread grows with the answer's length.  Nor the mean log p, which stops at 0 as soon as an
answer is known by heart: log-odds keep telling such models apart, and are closer to the Gaussians
that U-LiRA fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from stable_forgetting.common.audits.base import (
    NOT_NEGATIVE,
    AuditInfo,
    Measure,
    Measures,
    PartNames,
    Parts,
    PopulationAudit,
    TooFew,
)
from stable_forgetting.common.audits.intervals import bootstrap_mean
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.base.seeding import derive, hash_order

PARTS = ("forget", "retain", "test")
ENOUGH = 16
"""Models per side below which a note is printed (and U-LiRA pools its variances)."""


class PopulationConfig(Strict):
    """Which parts are compared.

    Attributes:
        parts: Parts of the split, ``test`` for all that is held out; those that were not scored are
            left out.
        clip: Margins are clipped to [-clip, clip].
    """

    parts: PartNames = PARTS
    clip: Positive = 100.0


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


def check(unlearned: Sequence[Parts], retrained: Sequence[Parts], least: int) -> None:
    """Raises TooFew if a side has fewer than ``least`` models."""
    if min(len(unlearned), len(retrained)) < least:
        raise TooFew(
            f"needs {least} unlearned models and Retrains of one split, found {len(unlearned)} and "
            f"{len(retrained)}: train shadows with --shadows {least} or more"
        )


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
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) / q), 0.0)
    divergences: np.ndarray = terms.sum(axis=0)
    return divergences


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
            permuted_samples: They look at no more than this many samples.
        """

        bins: Annotated[int, Field(ge=2)] = 20
        floor: Positive = 1e-5
        permutations: Count = 99
        permuted_samples: Count = 500

    def compare(
        self, unlearned: Sequence[Parts], retrained: Sequence[Parts], *, seed: int
    ) -> Measures:
        """Mean (bootstrap over samples), 95th percentile and p per part."""
        check(unlearned, retrained, self.least["fixed"])
        note = few_models(len(unlearned), len(retrained))
        measures: Measures = {}
        for part in self.shared(unlearned[0], retrained[0]):
            ours, theirs = (margins(m, part, self.config.clip) for m in (unlearned, retrained))
            values = self._values(ours, theirs)
            stream = derive(seed, "klom", part)
            mean = bootstrap_mean(values, stream)
            measures[part] = replace(mean, n=len(ours), note=note or mean.note)
            measures[f"{part} p95"] = Measure(
                float(np.percentile(values, 95)), n=len(ours), bounds=NOT_NEGATIVE
            )
            measures[f"{part} p"] = self._permutation(ours, theirs, stream)
        return measures

    def _values(self, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        return klom_per_sample(ours, theirs, bins=self.config.bins, floor=self.config.floor)

    def _permutation(self, ours: np.ndarray, theirs: np.ndarray, seed: int) -> Measure:
        generator = np.random.default_rng(derive(seed, "permutations"))
        pool = np.concatenate([ours, theirs])
        some = hash_order(range(pool.shape[1]), seed, "permuted")[: self.config.permuted_samples]
        pool = pool[:, some]

        def mean(order: np.ndarray) -> float:
            first, second = pool[order[: len(ours)]], pool[order[len(ours) :]]
            return float(self._values(first, second).mean())

        observed = mean(np.arange(len(pool)))
        draws = [mean(generator.permutation(len(pool))) for _ in range(self.config.permutations)]
        as_large = sum(value >= observed - 1e-12 for value in draws)
        p = (1 + as_large) / (1 + len(draws))
        return Measure(p, n=len(pool), bounds=(0.0, 1.0))
