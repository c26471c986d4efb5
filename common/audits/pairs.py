"""Two models, the same samples, their stored scores: no forward pass, seconds at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from stable_forgetting.common.audits.base import (
    PERCENT,
    AuditInfo,
    Measure,
    Measures,
    NotApplicable,
    PairAudit,
    PartNames,
    Parts,
    whole_classes,
)
from stable_forgetting.common.audits.intervals import (
    FEW,
    bootstrap,
    bootstrap_mean,
    dkw,
    proportion,
)
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Positive
from stable_forgetting.common.base.seeding import derive, hash_order
from stable_forgetting.common.measure.answers import js_rows, kl_rows
from stable_forgetting.common.measure.gaps import ks_two_sample
from stable_forgetting.common.measure.scores import Scores, auc

PARTS = ("forget", "retain", "test", "test_forget")
_TINY = 1e-38


class PairConfig(Strict):
    """Which parts are compared.

    Attributes:
        parts: Parts of the split, ``test`` for all that is held out; those that were not scored are
            left out.
    """

    parts: PartNames = PARTS


def aligned(
    first: Parts, second: Parts, parts: Iterable[str]
) -> Iterator[tuple[str, Scores, Scores]]:
    """(part, first, second) of parts that both have.

    Raises:
        DataError: The two were not scored on the same samples.
    """
    for part in parts:
        one, two = first[part], second[part]
        if not np.array_equal(one.indices, two.indices):
            raise DataError(f"part '{part}' of the two models holds different samples; rerun")
        yield part, one, two


def distributions(
    first: Parts, second: Parts, parts: Iterable[str]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(part, p, q) of the aligned parts, float64 (N, C): what each model gives to each answer.

    Raises:
        NotApplicable: No part keeps any.
    """
    none = True
    for part, one, two in aligned(first, second, parts):
        if one.probs is not None and two.probs is not None:
            none = False
            yield part, one.probs.astype(np.float64), two.probs.astype(np.float64)
    if none:
        raise NotApplicable("needs a softmax over classes, or wrong answers beside the right one")


class JensenShannon(PairAudit):
    """Mean Jensen-Shannon divergence between the two models' softmax outputs.

    Formula: mean_x [KL(p_U || m) + KL(p_R || m)] / 2, m = (p_U + p_R) / 2, in nats (0 to ln 2).
    On text p is over the answers that a question is compared with, the right and the wrong ones,
    each by the geometric mean of its token probabilities (as in disagreement and c2st).
    Source: Lin 1991; as an unlearning measure Chundawat et al. 2023 (arXiv 2205.08096).
    """

    info = AuditInfo(1, "free", "nats")
    Config = PairConfig

    def compare(self, first: Parts, second: Parts, *, seed: int) -> Measures:
        """One mean per part, with a bootstrap over samples."""
        return {
            part: bootstrap_mean(js_rows(p, q), derive(seed, "js", part))
            for part, p, q in distributions(first, second, self.shared(first, second))
        }


class Disagreement(PairAudit):
    """Share of samples on which the two models predict different classes.

    Formula: 100 P[argmax p_U(x) != argmax p_R(x)].  Source: prediction churn, Milani Fard et al.
    2016; as distance to Retrain in Golatkar et al. 2021.
    """

    info = AuditInfo(1, "free", "%")
    Config = PairConfig

    def compare(self, first: Parts, second: Parts, *, seed: int) -> Measures:
        """One share per part, with its Clopper-Pearson interval."""
        return {
            part: proportion(p.argmax(axis=1) != q.argmax(axis=1))
            for part, p, q in distributions(first, second, self.shared(first, second))
        }


class KolmogorovSmirnov(PairAudit):
    """Largest distance between the distribution functions of the two models' margins.

    Formula: D = sup_t |F_U(t) - F_R(t)| over margins log p_y - log(1 - p_y); also log10 of the
    two-sample p, which depends on n.  The interval is D +- both DKW bands (97.5 % each).  p takes
    the two samples as independent, and here they are the same inputs: read it beside the floor's.
    Source: Kolmogorov 1933, Smirnov 1948; used as "forget quality" by TOFU (arXiv 2401.06121).
    """

    info = AuditInfo(1, "free", "distance (log10 p)")

    class Config(PairConfig):
        parts: PartNames = ("forget", "test")

    def compare(self, first: Parts, second: Parts, *, seed: int) -> Measures:
        """Statistic and log10 p per part."""
        measures: Measures = {}
        for part, one, two in aligned(first, second, self.shared(first, second)):
            statistic, p = ks_two_sample(one.margin.tolist(), two.margin.tolist())
            half = dkw(len(one), 0.975) + dkw(len(two), 0.975)
            note = f"only {len(one)} samples" if len(one) < FEW else ""
            measures[part] = Measure(
                statistic,
                max(0.0, statistic - half),
                min(1.0, statistic + half),
                "95 % DKW, both samples",
                len(one),
                note,
                (0.0, 1.0),
            )
            log_p = float(np.log10(max(p, 1e-300)))
            measures[f"{part} log10 p"] = Measure(log_p, n=len(one), note=note, bounds=(None, 0.0))
        return measures


class ClassifierTwoSample(PairAudit):
    """Held-out accuracy of a classifier that is shown one output row and says whose it is.

    Formula: accuracy of an L2-regularised logistic regression on log-softmax rows and their squares
    (standardised), 50 is indistinguishable.  Every sample is shown from one model only, half train
    and half test, so that held-out rows are independent and the binomial interval is exact.
    Source: Lopez-Paz and Oquab 2017 (arXiv 1610.06545).
    """

    info = AuditInfo(1, "free", "%", "50")

    class Config(PairConfig):
        """Config of the test.

        Attributes:
            C: Inverse strength of the L2 penalty.
        """

        C: Positive = 0.1

    def compare(self, first: Parts, second: Parts, *, seed: int) -> Measures:
        """One held-out accuracy per part, with its Clopper-Pearson interval."""
        measures: Measures = {}
        for part, p, q in distributions(first, second, self.shared(first, second)):
            if len(p) < 8:
                measures[part] = Measure(None, n=len(p), note=f"only {len(p)} samples")
                continue
            measures[part] = self._accuracy(p, q, derive(seed, "c2st", part))
        return measures

    def _accuracy(self, ours: np.ndarray, theirs: np.ndarray, seed: int) -> Measure:
        from sklearn.linear_model import LogisticRegression

        order = hash_order(range(len(ours)), seed)
        fold, owner = np.arange(len(order)) % 2, np.arange(len(order)) // 2 % 2
        rows = np.where((owner == 1)[:, None], ours[order], theirs[order])
        values = np.log(np.maximum(rows, _TINY))
        values = np.concatenate([values, values**2], axis=1)
        train, test = fold == 0, fold == 1
        center, scale = values[train].mean(axis=0), values[train].std(axis=0)
        values = (values - center) / np.where(scale > 0, scale, 1.0)
        model = LogisticRegression(C=self.config.C, max_iter=1000)
        model.fit(values[train], owner[train])
        return proportion(model.predict(values[test]) == owner[test])


def forgotten_labels(scores: Parts) -> np.ndarray:
    """Classes of which nothing is retained, sorted.

    Raises:
        NotApplicable: There are none.
    """
    forget, retain = scores["forget"].labels, scores["retain"].labels
    if forget is None or retain is None:
        raise NotApplicable("needs one class label per sample")
    return whole_classes(forget, retain)


def over_retained(probs: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """(N, C - K) softmax renormalised over the classes that were not forgotten."""
    retained = np.maximum(np.delete(probs, gone, axis=1), _TINY)
    shares: np.ndarray = retained / retained.sum(axis=1, keepdims=True)
    return shares


class RetainedKL(PairAudit):
    """Where the mass of forgotten-class inputs goes, against where Retrain puts it.

    Formula: mean_x KL(r(p_R(x)) || r(p_U(x))) in nats, r = softmax renormalised over the retained
    classes, x in the forgotten classes.  FA = 0 and MIA = 100 saturate there; this does not.
    Source: the geometry of class unlearning, Ebrahimpour-Boroojeny et al. (arXiv 2506.20893).
    """

    info = AuditInfo(1, "free", "nats", scenario="class")

    class Config(PairConfig):
        parts: PartNames = ("forget", "test_forget")

    def compare(self, first: Parts, second: Parts, *, seed: int) -> Measures:
        """One mean per part, with a bootstrap over samples."""
        gone = forgotten_labels(first)
        return {
            part: bootstrap_mean(
                np.maximum(kl_rows(over_retained(q, gone), over_retained(p, gone)), 0.0),
                derive(seed, "retained-kl", part),
            )
            for part, p, q in distributions(first, second, self.shared(first, second))
        }


class NeighbourClass(PairAudit):
    """CMIA in score form: the neighbour class's probability gives unlearned models away.

    Formula: n(c) = the retained class with the largest mean renormalised probability under Retrain
    on inputs of the forgotten class c; score s(x) = logit of r_n(x); AUC of s between Retrain and
    U on the same inputs, folded as max(AUC, 100 - AUC).  50 is indistinguishable; folding makes
    chance slightly more than 50, so read it beside the second Retrain.  The paper's attack model
    is not in our sources (abstract only); the threshold attack stands for it.
    Source: Ebrahimpour-Boroojeny et al., ICML 2026 (arXiv 2506.20893).
    """

    info = AuditInfo(1, "free", "% AUC", "50, at the floor", "class")

    class Config(PairConfig):
        parts: PartNames = ("forget", "test_forget")

    def compare(self, first: Parts, second: Parts, *, seed: int) -> Measures:
        """One AUC per part, with a bootstrap over inputs (pairs kept together)."""
        gone = forgotten_labels(first)
        measures: Measures = {}
        for part, p, q in distributions(first, second, self.shared(first, second)):
            ours, theirs = over_retained(p, gone), over_retained(q, gone)
            labels = first[part].labels
            near = np.zeros(len(p), dtype=np.int64)
            for label in gone:
                members = labels == label
                if members.any():
                    near[members] = theirs[members].mean(axis=0).argmax()
            chosen = [shares[np.arange(len(p)), near] for shares in (ours, theirs)]
            u, r = (np.log(np.maximum(s, _TINY)) - np.log(np.maximum(1 - s, _TINY)) for s in chosen)
            measures[part] = self._folded(u, r, derive(seed, "cmia", part))
        return measures

    def _folded(self, u: np.ndarray, r: np.ndarray, seed: int) -> Measure:
        value = auc(r, u)
        low, high = bootstrap(len(u), lambda drawn: auc(r[drawn], u[drawn]), seed)
        if value < 50:
            value, low, high = 100 - value, 100 - high, 100 - low
        note = f"only {len(u)} samples" if len(u) < FEW else ""
        return Measure(value, low, high, "95 % bootstrap over samples", len(u), note, PERCENT)
