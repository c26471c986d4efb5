"""Who was in the forget set?  Attacks on its membership, from the logits of one or two models."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from stable_forgetting.common import data, objectives
from stable_forgetting.common.audits.base import (
    PERCENT,
    AuditInfo,
    AuditTask,
    Measure,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import FEW
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.data.parts import Part
from stable_forgetting.common.measure.scores import auc

if TYPE_CHECKING:
    from torch import Tensor, nn


Whose = Literal["model", "original", "reference"]
"""A model of an :class:`AuditTask`."""
KEPT = 256
"""Likelihoods of so many models and sets of samples stay in memory."""
_KNOWN: dict[tuple[str, bytes, int], np.ndarray] = {}
"""(Key of a stored model, samples, samples per forward) -> likelihoods, the oldest first."""


def sides(task: AuditTask, table: Mapping[str, Part]) -> tuple[np.ndarray, np.ndarray]:
    """Samples to forget, and samples like them that no model has seen.

    Both are parts that the benchmark names for this.  Without them they are the forget set, and
    test samples of its classes.

    Raises:
        NotApplicable: There are no unseen ones.
    """
    parts = task.split.parts
    named = {table[name].membership: name for name in parts if name in table and len(parts[name])}
    members = parts[named.get("member", "forget")]
    if "unseen" in named:
        return members, parts[named["unseen"]]
    test = parts.get("test", parts["forget"][:0])
    try:
        same = np.isin(task.labels(test), task.labels(members))
    except NotApplicable:  # sequences
        same = np.zeros(0, dtype=bool)
    if not same.any():
        raise NotApplicable("no samples like the forgotten ones that no model has seen")
    return members, test[same]


def per_sample(
    task: AuditTask,
    model: nn.Module,
    indices: np.ndarray,
    value: Callable[[Tensor, Tensor], Tensor],
) -> np.ndarray:
    """(N,) float64 of ``value``: (N, T, C) logits and (N, T) labels -> (N,), in one pass.

    Positions without a label are marked as in :data:`common.data.batch.IGNORE`.
    """
    import torch

    model.eval()
    rows = []
    with torch.inference_mode():
        for batch in data.ordered_batches(task.source, indices, task.batch_size):
            logits, labels = task.family.forward(model, batch).float(), batch.labels
            if labels.ndim == 1:
                logits, labels = logits.unsqueeze(1), labels.unsqueeze(1)
            rows.append(value(logits, labels).double().cpu().numpy())
    return np.concatenate(rows)


def likelihoods(task: AuditTask, whose: Whose) -> Callable[[np.ndarray], np.ndarray]:
    """Indices -> (N,) their likelihoods under one of the task's models.

    Several attacks ask for the same ones: of a stored model a process computes them once.
    """
    loaders = {
        "model": task.load,
        "original": task.load_original,
        "reference": task.load_reference,
    }
    loader = loaders[whose]
    assert loader is not None, "without a reference the attack is not applicable"
    load = cache(loader)

    def score(indices: np.ndarray) -> np.ndarray:
        place = task.stored.get(whose, ""), indices.tobytes(), task.batch_size
        found = _KNOWN.get(place)
        if found is None:
            found = per_sample(task, load(), indices, objectives.log_likelihood)
            if place[0]:
                _KNOWN[place] = found
            if len(_KNOWN) > KEPT:
                del _KNOWN[next(iter(_KNOWN))]
        return found

    return score


def lowest(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Min-K++ of logits and labels: the mean over the ``share`` of positions where it is lowest.

    Of a position it is (log p_y - mu) / sigma, with mean and deviation of log p over p.
    """
    import torch

    def value(logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        mu = (p * log_p).sum(-1)
        sigma = ((p * log_p.square()).sum(-1) - mu.square()).clamp_min(1e-6).sqrt()
        own = log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        scores = ((own - mu) / sigma).masked_fill(labels == data.IGNORE, math.inf)
        counts = (share * (labels != data.IGNORE).sum(1)).ceil().clamp_min(1).long()
        ordered = scores.sort(1).values
        chosen = torch.arange(ordered.shape[1], device=ordered.device) < counts.unsqueeze(1)
        return torch.where(chosen, ordered, 0.0).sum(1) / counts

    return value


def separation(members: np.ndarray, others: np.ndarray) -> Measure:
    """AUC in percent with a normal interval from the variance of its placements (DeLong)."""
    area = auc(members, others)
    spreads = []
    for ours, theirs in ((members, others), (others, members)):
        places = np.searchsorted(np.sort(theirs), ours, "left")
        upto = np.searchsorted(np.sort(theirs), ours, "right")
        placements = (places + upto) / (2 * len(theirs))
        spread = np.var(placements, ddof=1) if len(ours) > 1 else math.inf
        spreads.append(spread / len(ours))
    half, n = 100 * 1.959964 * math.sqrt(float(sum(spreads))), len(members) + len(others)
    ends = (max(0.0, area - half), min(100.0, area + half))
    fewest = min(len(members), len(others))
    note = f"only {fewest} samples a side" if fewest < FEW else ""
    return Measure(area, *ends, "95 % normal over samples (DeLong)", n, note, PERCENT)


class MemberAttack(ModelAudit):
    """An attack that gives every sample a score: is it in the forget set, or was it never seen?"""

    info = AuditInfo(3, "minutes", "%", "that of Retrain, near 50")
    leaks: ClassVar[str] = "AUC"

    def measure(self, task: AuditTask) -> Measures:
        """How well the score separates forgotten samples from unseen ones."""
        score = self.scorer(task)
        members, unseen = sides(task, self.parts)
        return {"AUC": separation(score(members), score(unseen))}

    @abstractmethod
    def scorer(self, task: AuditTask) -> Callable[[np.ndarray], np.ndarray]:
        """(N,) indices -> (N,) scores; a larger one says "was trained on"."""


class MinKPlusPlus(MemberAttack):
    """Min-K++: the least likely tokens, against what the model thinks of the other ones.

    Formula: score = mean over the ``share`` of positions with the smallest z of z = (log p_y - mu)
    / sigma, mu and sigma mean and deviation of log p_v over v ~ p; AUC of forget against unseen.
    A classifier has one position.  The number of positions is rounded up, and the last label
    counts; open-unlearning rounds down and leaves that label out.
    Source: Zhang et al. 2024 (arXiv 2404.02936); open-unlearning (evals/metrics/mia).
    """

    class Config(Strict):
        """Config of the attack.

        Attributes:
            share: Of the positions, those with the smallest values; .2, as published.
        """

        share: Annotated[float, Field(gt=0, le=1)] = 0.2

    def scorer(self, task: AuditTask) -> Callable[[np.ndarray], np.ndarray]:
        """Min-K++ under the model."""
        model, value = task.load(), lowest(self.config.share)
        return lambda indices: per_sample(task, model, indices, value)


class ReferenceModel(MemberAttack):
    """Reference-model attack: who has a model that never saw the forgotten data.

    Formula: score = log p(y|x) - log p_ref(y|x), summed over positions, p_ref another Retrain; AUC
    of forget against unseen.  Two Retrains are each other's p_ref, so what they show adds up to
    100, and the noise floor is twice what one of them is off 50.
    Source: Carlini et al. 2021 (arXiv 2012.07805); open-unlearning (evals/metrics/mia).
    """

    referenced: ClassVar[bool] = True

    def scorer(self, task: AuditTask) -> Callable[[np.ndarray], np.ndarray]:
        """The likelihood ratio to another Retrain.

        Raises:
            NotApplicable: There is none.
        """
        if task.load_reference is None:
            raise NotApplicable("no second Retrain (retrains: 2 gives one)")
        return _ratio(task, "model", "reference")


class Snapshots(MemberAttack):
    """Two snapshots: who has Original and the unlearned model, and asks what was deleted.

    Formula: score = log p_O(y|x) - log p_U(y|x), summed over positions, O Original; AUC of forget
    against unseen.  Retrain shows it too: what it shows is what any deletion reveals.
    Source: 2505.24379 (two checkpoints of one model); Chen et al. 2021 (arXiv 2005.02205).
    """

    info = AuditInfo(3, "minutes", "%", "that of Retrain")

    def scorer(self, task: AuditTask) -> Callable[[np.ndarray], np.ndarray]:
        """How much the likelihood fell."""
        return _ratio(task, "original", "model")


def _ratio(task: AuditTask, above: Whose, below: Whose) -> Callable[[np.ndarray], np.ndarray]:
    """Indices -> (N,) log ratios of the likelihoods under two models."""
    ours, theirs = likelihoods(task, above), likelihoods(task, below)
    return lambda indices: np.asarray(ours(indices) - theirs(indices))
