"""The highest cross-entropy that a classifier's last layers allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from common.base.config import Strict
from common.measure.metric import MetricSpec
from common.protocol.probe import Probe, ProbeTable

if TYPE_CHECKING:
    from torch import nn

    from common.protocol.benchmark import Benchmark


class CeilingConfig(Strict):
    """There is nothing to set."""


class CeilingProbe(Probe):
    """Ceiling of the cross-entropy of a model whose last LayerNorm and head stay as they are.

    Adapters on MLPs or attention leave both frozen, so no ascent can pass it: a loss that stays
    below it has not shown that a method is stable.  A method that trains the head or the LayerNorm
    moves it.  Models that do not end in a LayerNorm and a linear head have none.
    """

    version = 1
    Config: ClassVar[type[Strict]] = CeilingConfig
    modality = "vision"
    own_data = False

    def measure(self, model: nn.Module, benchmark: Benchmark) -> ProbeTable:
        """One row per class: ``ceiling`` reached by ascent and ``bound`` proven, in nats."""
        from common.measure.ceiling import cross_entropy_ceilings
        from vision.models.last import last_layers

        layers = last_layers(model)
        if layers is None:
            return ProbeTable({"all": {"ceiling": None, "bound": None}})
        reached, bounds = cross_entropy_ceilings(layers)
        pairs = zip(reached.tolist(), bounds.tolist(), strict=True)
        rows = {f"class {label}": {"ceiling": c, "bound": b} for label, (c, b) in enumerate(pairs)}
        return ProbeTable(rows)

    def summary(self, table: ProbeTable) -> dict[str, float | None]:
        """The highest ceiling of any class."""
        ceilings = [row["ceiling"] for row in table.rows.values() if row["ceiling"] is not None]
        return {f"{self.name}.loss": max(ceilings) if ceilings else None}

    def related(self, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """How much of the ceiling the forget loss has."""
        loss, ceiling = metrics.get("forget_loss"), metrics.get(f"{self.name}.loss")
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
                doc="largest cross-entropy of any class that the model's last LayerNorm and head "
                "allow, whatever comes before them",
                collapsed="as any model with the same last layers",
                silent="where the head or the last LayerNorm is trained: it moves with them",
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
