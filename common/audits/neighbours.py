"""Over-unlearning: what happens to the classes next to the forgotten ones."""

from __future__ import annotations

import numpy as np

from common.audits.base import PERCENT, AuditInfo, Measure, Measures, PairAudit, PartNames, Parts
from common.audits.intervals import FEW, bootstrap
from common.audits.pairs import _TINY, PairConfig, distributions, forgotten_labels, over_retained
from common.base.seeding import derive
from common.measure.ranking import auc


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
            u, r = (_logit(p[np.arange(len(p)), near]) for p in (ours, theirs))
            measures[part] = self._folded(u, r, derive(seed, "cmia", part))
        return measures

    def _folded(self, u: np.ndarray, r: np.ndarray, seed: int) -> Measure:
        value = auc(r, u)
        low, high = bootstrap(len(u), lambda drawn: auc(r[drawn], u[drawn]), seed)
        if value < 50:
            value, low, high = 100 - value, 100 - high, 100 - low
        note = f"only {len(u)} samples" if len(u) < FEW else ""
        return Measure(value, low, high, "95 % bootstrap over samples", len(u), note, PERCENT)


def _logit(p: np.ndarray) -> np.ndarray:
    log_odds: np.ndarray = np.log(np.maximum(p, _TINY)) - np.log(np.maximum(1 - p, _TINY))
    return log_odds
