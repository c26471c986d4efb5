"""The loss on the forget set, in the unit of a model's ceiling (:mod:`common.probes.ceiling`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.language.metrics.limits import limited

if TYPE_CHECKING:
    from stable_forgetting.common.measure.scores import Scores

LOSSES: tuple[MetricSpec, ...] = limited(
    [
        MetricSpec(
            "forget_loss",
            "target",
            "forget loss",
            unit="nats per token",
            digits=2,
            doc="mean cross-entropy on the forget set: over a sample's tokens, then over samples",
        )
    ]
)


def losses(scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """The mean loss of the forget set, in nats per token."""
    return {"forget_loss": float(scores["forget"].loss.mean(dtype="float64"))}
