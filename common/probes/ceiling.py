"""The highest cross-entropy that a model's last layers allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.protocol.benchmark import Benchmark
from stable_forgetting.common.protocol.probe import Probe, ProbeTable

if TYPE_CHECKING:
    from torch import nn


ALL, SOME = 512, 32
"""The most classes that are all asked, and how many of more."""


class CeilingProbe(Probe):
    """Ceiling of the cross-entropy of a model whose last normalisation and head stay as they are.

    Adapters on MLPs or attention leave both frozen, so no ascent can pass it: a loss that stays
    below it has not shown that a method is stable.  A head that is tied to the embedding is frozen
    with it.  A method that trains the head or the normalisation moves the ceiling.  Models that do
    not end in a normalisation and a linear head have none.
    """

    version = 1
    Config = Strict

    def measure(self, model: nn.Module, benchmark: Benchmark) -> ProbeTable:
        """One row per class: ``ceiling`` reached by ascent and ``bound`` proven, in nats.

        Of more than :data:`ALL` classes, such as tokens, :data:`SOME` are taken, evenly spaced.
        """
        from stable_forgetting.common.measure.ceiling import cross_entropy_ceilings

        layers = benchmark.last_layers(model)
        if layers is None:
            return ProbeTable({"all": {"ceiling": None, "bound": None}})
        count = len(layers.weight)
        labels = range(count) if count <= ALL else range(0, count, -(-count // SOME))
        pairs = (each.tolist() for each in cross_entropy_ceilings(layers, labels))
        rows = {
            f"class {label}": {"ceiling": reached, "bound": bound}
            for label, reached, bound in zip(labels, *pairs, strict=True)
        }
        return ProbeTable(rows)

    def summary(self, table: ProbeTable) -> dict[str, float | None]:
        """The highest ceiling of any class."""
        ceilings = [row["ceiling"] for row in table.rows.values() if row["ceiling"] is not None]
        return {f"{self.name}.loss": max(ceilings) if ceilings else None}

    def related(self, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """How much of the ceiling the forget loss has; nothing where no such loss is measured."""
        if "forget_loss" not in metrics:
            return {}
        loss, ceiling = metrics["forget_loss"], metrics.get(f"{self.name}.loss")
        share = None if loss is None or not ceiling else 100 * loss / ceiling
        return {f"{self.name}.reached": share}

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        """The ceiling, and the share of it that the forget set's loss has reached."""
        return (
            MetricSpec(
                f"{self.name}.loss",
                "target",
                "CE ceiling",
                unit="nats",
                doc="largest cross-entropy of any class (of a vocabulary: of 32 tokens) that the "
                "model's last normalisation and head allow, whatever comes before them",
                collapsed="as any model with the same last layers",
                silent="where the head or the last normalisation is trained: it moves with them",
                digits=2,
            ),
            MetricSpec(
                f"{self.name}.reached",
                "target",
                "of ceiling",
                doc="mean cross-entropy of the forget set in percent of the ceiling",
                collapsed="about 100 where the loss was ascended to its ceiling",
                silent="where forgetting was not by ascent of this loss",
            ),
        )
