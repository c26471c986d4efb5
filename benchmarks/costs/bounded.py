"""``unlearn show bounded [--plan MODEL]``: what the layer is, and what it costs on a known model.

Models are counted in closed form from their published sizes: nothing is built, downloaded or
measured.  One *unit* is the product of N tokens with a k x d weight, 2 N k d FLOPs.  Only products
are counted; pointwise work enters by :data:`OVERHEADS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stable_forgetting.benchmarks.report.cells import giga, size, span
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.sizes import Shape, Sizes, adapter_parameters
from stable_forgetting.language.models.families import FAMILIES, PUBLISHED
from stable_forgetting.language.models.sizes import causal_sizes
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models.family import family_of
from stable_forgetting.vision.models.sizes import sizes_of as vit_sizes

Kind = Literal["frozen", "LoRA", "naive", "ours"]
KINDS: tuple[Kind, ...] = ("frozen", "LoRA", "naive", "ours")
ACTIVATION_BYTES = 2
"""bfloat16 weights and activations; factors, phi and optimizer state are float32."""
FACTOR_BYTES = 4
ADAM_BYTES = 16
"""Per trained parameter: itself, its gradient and AdamW's two moments."""
KERNEL_TILE, PROGRAMS, PROCESSORS = (64, 32), 4, 132
"""Output and input features of a tile of the contracting kernel, its programs per processor, and
the processors of an H100 or H200; they set its workspace.
"""


Range = tuple[float, float]
OVERHEADS: Mapping[str, tuple[Range, Range]] = {
    "products alone (the floor)": ((0, 0), (1, 1)),
    "CPU, float32, eager": ((310, 360), (1.05, 1.35)),
    "H200, bfloat16, Triton": ((3150, 4520), (1.52, 1.65)),
}
"""Machine -> (lowest, highest) n0, the build and phi' in tokens, and c, LoRA's time over its two
units.  Fitted to layer timings: CPU to many (good to 13 %), H200 to four of 4096 x 11008, rank 8
(``results/gpu``).  Smaller layers wait for launches there, LoRA's no less than ours.
"""
FORMULA = """\
layer   h = (W0 + (alpha/r) phi(omega A B^T)) x + b;  W0 (k x d) and b frozen, A (k x r), B (d x r)
naive   two products, W0 x and phi(omega A B^T) x; two k x d matrices kept per layer for backward
ours    one product on the merged weight; backward makes phi' again and keeps nothing dense"""
PAPER = (
    "The paper's own count of a forward pass, 2dk + (d+k)r operations (a multiply-add is 1 there),"
    " differs in kind, however near the sum: its second dk is the sine, evaluated once per build"
    " of the weight and not per token; the product of the dense sin(omega A B^T) with x (dk per"
    " token, the naive layer's second product) is not in it; (d+k)r would be A B^T applied in"
    " factors, but the sine needs the k x d matrix, kdr per build; and its backward pass leaves"
    " out g^T x, dk per token, the product that LoRA does not have."
)
DERIVED = (
    "Derived from formulas and sizes, not measured: time of ours u(3N + n0) over LoRA's 2uNc, with"
    " n0 the build and phi' in tokens and c what LoRA's skinny products add.  Both were fitted to"
    " layer timings: on a CPU, good to 13 %; on an H200 to layers of 4096 x 11008 (smaller ones"
    " wait for launches).  Every linear layer (the head too) counts, attention scores do not; every"
    " input needs its gradient."
)


# One layer ---------------------------------------------------------------------------------------


def flops_per_token(kind: Kind, k: int, d: int, rank: int, tokens: int) -> tuple[float, ...]:
    """FLOPs of products per token: forward, gradient of the input, gradient of the parameters.

    ``ours`` builds ``A B^T`` once forward and once backward, and contracts into A and B; the build
    is spread over ``tokens``.
    """
    unit, skinny, build = 2.0 * k * d, 2.0 * rank * (k + d), 2.0 * k * d * rank / tokens
    if kind == "frozen":
        return unit, unit, 0
    if kind == "LoRA":
        return unit + skinny, unit + skinny, skinny
    if kind == "naive":
        return 2 * unit + build, 2 * unit, unit + 2 * build
    return unit + build, unit, unit + 3 * build


def saved_bytes(kind: Kind, k: int, d: int, rank: int, tokens: int) -> int:
    """Bytes that one layer keeps for backward beyond its input and its weights."""
    if kind == "LoRA":  # x B; the naive layer keeps the argument of phi, and phi of it
        return FACTOR_BYTES * tokens * rank
    return FACTOR_BYTES * 2 * k * d if kind == "naive" else 0


def transient_bytes(kind: Kind, k: int, d: int, rank: int, tokens: int) -> int:
    """Largest bytes that one layer needs for a moment beside its output."""
    if kind == "frozen":
        return 0
    if kind == "ours":  # in backward: the weight and the workspace of the contracting kernel
        rows, columns = math.ceil(k / KERNEL_TILE[0]), math.ceil(d / KERNEL_TILE[1])
        strips = math.ceil(columns / max(1, rows * columns // (PROGRAMS * PROCESSORS)))
        parts = rows * rank * d + strips * k * rank
        return ACTIVATION_BYTES * k * d + FACTOR_BYTES * parts
    return ACTIVATION_BYTES * tokens * k  # a second output, before the two are added


def time_ratio(machine: str, tokens: int, share: float = 1.0) -> Range:
    """Derived time of linear layers over LoRA's: (lowest, highest).

    Args:
        machine: A key of :data:`OVERHEADS`.
        tokens: N of one forward pass.
        share: Of the layers' weights, what is adapted; the rest costs two units.
    """
    rest, (n0, c) = 2 * (1 - share), OVERHEADS[machine]

    def ratio(n0: float, c: float) -> float:
        return (rest + share * (3 + n0 / tokens)) / (rest + share * 2 * c)

    return ratio(n0[0], c[1]), ratio(n0[1], c[0])


# A model -----------------------------------------------------------------------------------------

PLACEMENTS = ("mlp", "attention", "all")
Model = tuple[Sizes, Mapping[str, tuple[str, ...]], str]
"""Sizes, patterns of each placement, and what the number of parameters includes."""


def _models() -> Iterator[tuple[str, Model]]:
    for name, (model_type, fields) in PUBLISHED.items():
        family, tied = FAMILIES[model_type], "embeddings included, the head tied to them"
        sizes = causal_sizes(model_type, fields)
        yield name, _model(sizes, family, tied if family.tied else "embeddings and head included")
    for width in ("small", "base", "large"):
        name = f"vit_{width}_patch16_224"
        sizes = vit_sizes(ModelConfig(name=name), num_classes=10)
        yield f"vit-{width[0]}", _model(sizes, family_of(name), "with a head of 10 classes")


def _model(sizes: Sizes | None, family: Any, base: str) -> Model:
    assert sizes is not None
    mlp, attention = family.mlp, family.attention
    return sizes, {"mlp": mlp, "attention": attention, "all": mlp + attention}, base


MODELS: Mapping[str, Model] = dict(_models())


@dataclass(frozen=True)
class LayerCosts:
    """What adapters on one model cost.

    Attributes:
        layers: Name -> shape of the adapted layers.
        tokens: N of one forward pass.
    """

    model: str
    layers: Mapping[str, Shape]
    rank: int
    tokens: int
    placement: str

    @property
    def base(self) -> int:
        """Parameters without adapters."""
        return MODELS[self.model][0].parameters

    @property
    def trained(self) -> int:
        """Parameters of the adapters."""
        return adapter_parameters(self.layers, self.rank)

    @property
    def percent_of_all(self) -> float:
        """Adapters in percent of the parameters with them, as PEFT prints it."""
        return 100 * self.trained / (self.base + self.trained)


def layer_costs(
    model: str, *, rank: int = 8, tokens: int = 4096, placement: str = "mlp"
) -> LayerCosts:
    """Counts a known model's layers.

    Raises:
        ConfigError: There is no such model or placement.
    """
    if model not in MODELS:
        hint = did_you_mean(model, [*MODELS])
        raise ConfigError(f"--plan {model}: no such model{hint}")
    if placement not in PLACEMENTS:
        raise ConfigError(f"--placement {placement}: choose {', '.join(PLACEMENTS)}")
    sizes, patterns, _ = MODELS[model]
    return LayerCosts(model, sizes.matched(patterns[placement]), rank, tokens, placement)


# What is shown -----------------------------------------------------------------------------------


def sections(costs: LayerCosts | None) -> list[Section]:
    """The layer in formulas, and what it costs on a model."""
    formula = Section(text=(FORMULA,))
    if costs is None:
        how = "Costs on a model: unlearn show bounded --plan MODEL"
        return [formula, Section(text=(f"\n{how}\nmodels  {', '.join(MODELS)}",))]
    tables = [_layers(costs), _products(costs), _memory(costs), Section(text=(PAPER,))]
    return [formula, *tables, _expected_time(costs), Section(text=(DERIVED,))]


def _layers(costs: LayerCosts) -> Section:
    """What is adapted, and the parameters."""
    rows = []
    shapes: dict[Shape, list[str]] = {}
    for name, shape in costs.layers.items():
        shapes.setdefault(shape, []).append(name.rpartition(".")[2])
    for (k, d), names in shapes.items():
        parameters = costs.rank * (k + d) * len(names)
        words = ", ".join(dict.fromkeys(names))
        rows.append([words, f"{k} x {d}", f"{len(names)}", f"{parameters:,}"])
    rows.append(["adapters", "", f"{len(costs.layers)}", f"{costs.trained:,}"])
    rows.append([f"model ({MODELS[costs.model][2]})", "", "", f"{costs.base:,}"])
    share = f"{100 * costs.trained / costs.base:.3f} %"
    rows.append(["share of the model without adapters", "", "", share])
    rows.append(["share of the model with adapters", "", "", f"{costs.percent_of_all:.3f} %"])
    title = f"{costs.model}: {costs.placement} layers, r = {costs.rank}"
    return Section(title, content=table(["layers", "k x d", "count", "parameters"], rows))


def _products(costs: LayerCosts) -> Section:
    """Products of the adapted layers, per token, and the paper's count beside them."""
    shapes, size = costs.layers.values(), (costs.rank, costs.tokens)
    totals = {}
    for kind in KINDS:
        of_layers = [flops_per_token(kind, *shape, *size) for shape in shapes]
        parts = [math.fsum(part) for part in zip(*of_layers, strict=True)]
        totals[kind] = [*parts, math.fsum(parts)]
    lora = totals["LoRA"][-1]
    rows = [[kind, *map(giga, parts), f"{parts[-1] / lora:.2f}"] for kind, parts in totals.items()]
    paper = sum(2 * d * k + (d + k) * costs.rank for k, d in shapes)
    rows.append(["the paper's operations", giga(paper), "", "", "", ""])
    title = f"Adapted layers, GFLOP per token of {costs.tokens} (products; a multiply-add is 2)"
    heads = ["", "forward", "dx", "parameters", "total", "of LoRA"]
    return Section(title, content=table(heads, rows))


def _memory(costs: LayerCosts) -> Section:
    rows = []
    for kind in KINDS:
        sizes = [(kind, *shape, costs.rank, costs.tokens) for shape in costs.layers.values()]
        saved = sum(saved_bytes(*each) for each in sizes)
        moment = max(transient_bytes(*each) for each in sizes)
        state = 0 if kind == "frozen" else ADAM_BYTES * costs.trained
        rows.append([kind, size(saved), size(moment), size(state)])
    weights = size(ACTIVATION_BYTES * costs.base)
    title = f"Memory at {costs.tokens} tokens; the model's weights in bfloat16: {weights}"
    heads = ["", "saved for backward beyond x, all layers", "transient, largest", "A, B and AdamW"]
    return Section(title, content=table(heads, rows))


def _expected_time(costs: LayerCosts) -> Section:
    adapted = sum(k * d for k, d in costs.layers.values()) / MODELS[costs.model][0].weights
    rows = []
    for machine in OVERHEADS:
        ratios = (time_ratio(machine, costs.tokens, share) for share in (1.0, adapted))
        rows.append([machine, *(span(*ratio) for ratio in ratios)])
    heads = ["derived, not measured", "adapted layers", "all linear layers"]
    title = f"Expected time over LoRA's at {costs.tokens} tokens, forward and backward"
    return Section(title, content=table(heads, rows))
