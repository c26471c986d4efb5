"""A model in numbers, without building it; and what a rehearsal runs in its place."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from stable_forgetting.common.base.config import Strict

Shape = tuple[int, int]
"""(outputs, inputs) of a linear layer."""


@dataclass(frozen=True)
class Sizes:
    """What a transformer consists of.

    Attributes:
        parameters: Of the model without adapters; a tied head counts once.
        linear: Module name -> shape of each linear layer, in the model's order.
        width: Of its hidden states.
        depth: Blocks.
        outputs: Logits per position.
    """

    parameters: int
    linear: Mapping[str, Shape]
    width: int
    depth: int
    outputs: int

    @property
    def weights(self) -> int:
        """Entries of the weights of all linear layers."""
        return sum(map(prod, self.linear.values()))

    def matched(self, patterns: Sequence[str]) -> dict[str, Shape]:
        """The linear layers whose names fit one of the patterns."""
        return {
            name: shape
            for name, shape in self.linear.items()
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        }


def adapter_parameters(layers: Mapping[str, Shape], rank: int) -> int:
    """sum of rank * (outputs + inputs)."""
    return rank * sum(map(sum, layers.values()))


def linear_parameters(layers: Mapping[str, Shape], *, bias: bool) -> int:
    """Weights, and a bias per output where there is one."""
    return sum(k * d + bias * k for k, d in layers.values())


@dataclass(frozen=True)
class Workload:
    """How much a protocol moves, known from its config alone; what is estimated from it is no fact.

    Attributes:
        parts: Part -> samples of it that may be trained on.
        positions: Of a sample in a training batch, padding included: tokens or patches.
        longest: Of the longest sample.
        scored: Positions of one evaluation's forward passes.
        decoded: Steps of one evaluation's greedy decoding, at most.
        targets: Placement -> patterns of the layers that adapters go to.
        half: Whether weights that are not trained take two bytes each.
        quantised: Bytes of a weight of the blocks, where they are packed; else 0.
        checkpointing: Whether activations are computed again in the backward pass.
    """

    sizes: Sizes
    parts: Mapping[str, int]
    positions: int
    longest: int
    scored: int
    decoded: int
    targets: Mapping[str, Sequence[str]]
    half: bool = False
    quantised: float = 0.0
    checkpointing: bool = False


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
