"""What a rehearsal runs in the place of a protocol's model and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stable_forgetting.common.base.config import Strict


@dataclass(frozen=True)
class StandIn:
    """A protocol that a CPU runs in seconds.

    Attributes:
        config: Of the same benchmark.
        notes: What stands in for what, in words.
        samples: Part -> samples of the real data, where the stand-in's data has other ones.
    """

    config: Strict
    notes: tuple[str, ...] = ()
    samples: Mapping[str, int] = field(default_factory=dict)
