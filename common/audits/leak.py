"""An attack that only asks, many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from stable_forgetting.common.audits.base import (
    PERCENT,
    AuditInfo,
    AuditTask,
    Measures,
    ModelAudit,
)
from stable_forgetting.common.audits.intervals import bootstrap_mean
from stable_forgetting.common.audits.members import per_sample
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.base.seeding import derive, generator

if TYPE_CHECKING:
    from torch import Tensor


class Leak(ModelAudit):
    """leak@k: the best of k draws at a temperature, where a greedy answer hides.

    Formula: mean over forget samples of the expected largest share of right positions among ``k``
    answers drawn from softmax(z / T); every position is drawn behind the right ones before it.  For
    one position this is 1 - (1 - p_y)^k, exactly; else the mean over ``rounds`` of k draws.
    Source: leak@k, arXiv 2511.04934 (there whole answers are written and judged by their text).
    """

    info = AuditInfo(1, "minutes", "%", "that of Retrain")
    budget: ClassVar[Mapping[str, str]] = {"samples": "k"}

    class Config(Strict):
        """Config of the draws.

        Attributes:
            k: Answers that the attacker draws.
            temperature: Divides the logits.
            rounds: How often k answers are drawn, where there are several positions.
        """

        k: Count = 16
        temperature: Positive = 1.0
        rounds: Count = 20

    def measure(self, task: AuditTask) -> Measures:
        """The share of right positions of the best answer."""
        value = per_sample(task, task.load(), task.split.parts["forget"], self._best(task))
        return {"forget": bootstrap_mean(100 * value, derive(task.seed, "leak"), PERCENT)}

    def _best(self, task: AuditTask) -> Callable[[Tensor, Tensor], Tensor]:
        import torch

        from stable_forgetting.common.data.batch import IGNORE

        k, rounds = self.config.k, self.config.rounds
        stream = generator(task.seed, "audit", "leak")

        def best(logits: Tensor, labels: Tensor) -> Tensor:
            p = (logits / self.config.temperature).softmax(-1).double()
            right = p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).cpu()
            if labels.shape[1] == 1:
                once: Tensor = 1 - (1 - right[:, 0]).clamp(0, 1) ** k
                return once
            counted = (labels != IGNORE).cpu()
            total: Tensor = torch.zeros(len(labels), dtype=torch.float64)
            for _ in range(rounds):
                drawn = torch.rand(k, *right.shape, generator=stream, dtype=torch.float64) < right
                shares = (drawn & counted).sum(-1) / counted.sum(-1).clamp_min(1)
                total += shares.max(0).values
            mean: Tensor = total / rounds
            return mean

        return best
