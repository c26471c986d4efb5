"""Costs of the bounded layer from sizes alone: products, bytes, expected ratio to LoRA.

One *unit* is the product of N tokens with a k x d weight, 2 N k d FLOPs.  Only products are
counted; pointwise work enters by :data:`OVERHEADS`.  Nothing here is measured: ratios follow from

    time of ours = u (3 N + n0),     time of LoRA = u (2 N c),

with u the time of a unit per token, n0 the build of the weight and phi' in tokens, and c >= 1 what
LoRA's skinny products and N x k temporaries add to its two units.

The paper's own count (its appendix on complexity) is :func:`paper_forward`.  It differs in kind:
its k d for the sine is an elementwise evaluation per *build*, not per token; it forms
``sin(omega A B^T) x`` without counting that product (k d per token), counts ``A B^T`` as if it
were applied to x in factors ((d + k) r, though the k x d matrix takes k d r), and its backward
pass leaves out ``g^T x``, the largest product of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["frozen", "LoRA", "naive", "ours"]
KINDS: tuple[Kind, ...] = ("frozen", "LoRA", "naive", "ours")
ACTIVATION_BYTES = 2
"""bfloat16 weights and activations; factors, phi and optimizer state are float32."""
FACTOR_BYTES = 4
ADAM_BYTES = 16
"""Per trained parameter: itself, its gradient and AdamW's two moments."""
KERNEL_TILE = (128, 64)
"""Output and input features of a program of the contracting kernel; sets its workspace."""


@dataclass(frozen=True)
class Layers:
    """Linear layers of one shape.

    Attributes:
        names: Last parts of their module names.
    """

    k: int
    d: int
    count: int = 1
    names: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Entries of all the weights."""
        return self.k * self.d * self.count


@dataclass(frozen=True)
class Flops:
    """FLOPs of products: forward, gradient of the input, gradient of the parameters."""

    forward: float
    inputs: float
    parameters: float

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.forward + self.inputs + self.parameters


@dataclass(frozen=True)
class Overhead:
    """A model of what is not products: (lowest, highest) each.

    Attributes:
        n0: Build and phi' in tokens.
        c: LoRA's time over its two units.
    """

    name: str
    n0: tuple[float, float]
    c: tuple[float, float]


OVERHEADS = (
    Overhead("products alone (the floor)", (0, 0), (1, 1)),
    Overhead("CPU, float32, eager", (310, 360), (1.05, 1.35)),
    Overhead("H100, bfloat16, fused kernels", (530, 930), (1, 1)),
)
"""CPU: fitted to layer timings (good to 13 %); H100: a roofline model, nothing was run there."""


def flops_per_token(kind: Kind, k: int, d: int, rank: int, tokens: int) -> Flops:
    """FLOPs per token of one layer; the build is spread over ``tokens``.

    ``ours`` builds ``A B^T`` once forward and once backward, and contracts into A and B.
    """
    unit, skinny, build = 2.0 * k * d, 2.0 * rank * (k + d), 2.0 * k * d * rank / tokens
    if kind == "frozen":
        return Flops(unit, unit, 0)
    if kind == "LoRA":
        return Flops(unit + skinny, unit + skinny, skinny)
    if kind == "naive":
        return Flops(2 * unit + build, 2 * unit, unit + 2 * build)
    return Flops(unit + build, unit, unit + 3 * build)


def paper_forward(k: int, d: int, rank: int) -> int:
    """The paper's operations per forward pass of a layer: ``2 d k + (d + k) r``, constants 1."""
    return 2 * d * k + (d + k) * rank


def saved_bytes(kind: Kind, k: int, d: int, rank: int, tokens: int) -> int:
    """Bytes that one layer keeps for backward beyond its input and its weights.

    LoRA keeps ``x B``; the naive layer keeps the argument of phi and phi of it.
    """
    if kind == "LoRA":
        return FACTOR_BYTES * tokens * rank
    return FACTOR_BYTES * 2 * k * d if kind == "naive" else 0


def transient_bytes(kind: Kind, k: int, d: int, rank: int, tokens: int) -> int:
    """Largest bytes that one layer needs for a moment beside its output.

    LoRA and the naive layer hold a second N x k output before the two are added.  Ours holds the
    merged weight, or in backward the weight and the workspace of the contracting kernel.
    """
    if kind == "frozen":
        return 0
    if kind == "ours":
        rows, columns = KERNEL_TILE
        parts = math.ceil(k / rows) * rank * d + math.ceil(d / columns) * k * rank
        return ACTIVATION_BYTES * k * d + FACTOR_BYTES * parts
    return ACTIVATION_BYTES * tokens * k


def adapter_parameters(layers: Sequence[Layers], rank: int) -> int:
    """sum of r (k + d)."""
    return sum(rank * (layer.k + layer.d) * layer.count for layer in layers)


def layer_ratio(overhead: Overhead, tokens: int) -> tuple[float, float]:
    """Derived time of adapted layers, forward and backward, over LoRA's: (lowest, highest)."""
    return step_ratio(overhead, tokens, share=1.0)


def step_ratio(overhead: Overhead, tokens: int, share: float) -> tuple[float, float]:
    """Derived time of all linear layers over LoRA's: (lowest, highest).

    Args:
        overhead: The machine.
        tokens: N of one forward pass.
        share: Of the linear layers' weights, what is adapted; the rest costs two units.
    """
    rest = 2 * (1 - share)

    def ratio(n0: float, c: float) -> float:
        return (rest + share * (3 + n0 / tokens)) / (rest + share * 2 * c)

    return ratio(overhead.n0[0], overhead.c[1]), ratio(overhead.n0[1], overhead.c[0])
