"""What text benchmarks measure (``metrics.toml``), and the loss on the forget set of all of them.

The loss has the unit of a model's ceiling (:mod:`common.probes.ceiling`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.scores import Scores

_TABLES = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))


def described(benchmark: str) -> tuple[MetricSpec, ...]:
    """The metrics of a benchmark, and after them the loss."""
    return tuple(
        MetricSpec(**{"name": name, "better": "target", **fields})
        for table in (benchmark, "loss")
        for name, fields in _TABLES[table].items()
    )


def losses(scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """The mean loss of the forget set, in nats per token."""
    return {"forget_loss": float(scores["forget"].loss.mean(dtype="float64"))}
