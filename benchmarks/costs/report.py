"""What the bounded layer costs -> sections, for ``unlearn show bounded``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stable_forgetting.benchmarks.costs import layer as formulas
from stable_forgetting.benchmarks.costs.estimate import A100, Card, Estimate, total_hours
from stable_forgetting.benchmarks.costs.layer import FACTOR_BYTES
from stable_forgetting.benchmarks.costs.model import MODELS, LayerCosts
from stable_forgetting.benchmarks.report.cells import MISSING, giga, size, span
from stable_forgetting.benchmarks.report.section import Section, table

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
    " n0 the build and phi' in tokens and c what LoRA's skinny products add.  CPU: n0 and c were"
    " fitted to layer timings, good to 13 %.  H100: a roofline model, c = 1; never run there."
    "  Every linear layer (the head too) counts, attention scores do not; every input needs its"
    " gradient."
)


def sections(costs: LayerCosts | None) -> list[Section]:
    """The layer in formulas, and what it costs on a model."""
    formula = Section(text=(FORMULA,))
    if costs is None:
        how = "Costs on a model: unlearn show bounded --plan MODEL"
        return [formula, Section(text=(f"\n{how}\nmodels  {', '.join(MODELS)}",))]
    paper, derived = Section(text=(PAPER,)), Section(text=(DERIVED,))
    tables = [layers(costs), products(costs), memory(costs)]
    return [formula, *tables, paper, expected_time(costs), derived]


def layers(costs: LayerCosts) -> Section:
    """What is adapted, and the parameters."""
    rows = [
        [
            ", ".join(shape.names),
            f"{shape.k} x {shape.d}",
            f"{shape.count}",
            f"{formulas.adapter_parameters([shape], costs.rank):,}",
        ]
        for shape in costs.layers
    ]
    count = sum(shape.count for shape in costs.layers)
    rows.append(["adapters", "", f"{count}", f"{costs.trained:,}"])
    rows.append([f"model ({MODELS[costs.model].base})", "", "", f"{costs.base:,}"])
    rows.append(["share of the model without adapters", "", "", f"{costs.percent:.3f} %"])
    rows.append(["share of the model with adapters", "", "", f"{costs.percent_of_all:.3f} %"])
    title = f"{costs.model}: {costs.placement} layers, r = {costs.rank}"
    return Section(title, content=table(["layers", "k x d", "count", "parameters"], rows))


def _total(costs: LayerCosts, kind: formulas.Kind) -> formulas.Flops:
    parts = []
    for shape in costs.layers:
        size = (shape.k, shape.d, costs.rank, costs.tokens)
        parts.append((shape.count, formulas.flops_per_token(kind, *size)))
    return formulas.Flops(
        sum(count * part.forward for count, part in parts),
        sum(count * part.inputs for count, part in parts),
        sum(count * part.parameters for count, part in parts),
    )


def products(costs: LayerCosts) -> Section:
    """Products of the adapted layers, per token, and the paper's count beside them."""
    lora = _total(costs, "LoRA")
    rows = []
    for kind in formulas.KINDS:
        flops = _total(costs, kind)
        parts = (flops.forward, flops.inputs, flops.parameters, flops.total)
        rows.append([kind, *(giga(part) for part in parts), f"{flops.total / lora.total:.2f}"])
    paper = sum(n.count * formulas.paper_forward(n.k, n.d, costs.rank) for n in costs.layers)
    rows.append(["the paper's operations", giga(paper), "", "", "", ""])
    title = f"Adapted layers, GFLOP per token of {costs.tokens} (products; a multiply-add is 2)"
    heads = ["", "forward", "dx", "parameters", "total", "of LoRA"]
    return Section(title, content=table(heads, rows))


def memory(costs: LayerCosts) -> Section:
    """Memory of the adapted layers."""
    rows = []
    for kind in formulas.KINDS:
        sizes = [(n.count, (kind, n.k, n.d, costs.rank, costs.tokens)) for n in costs.layers]
        saved = sum(count * formulas.saved_bytes(*each) for count, each in sizes)
        moment = max(formulas.transient_bytes(*each) for _, each in sizes)
        state = 0 if kind == "frozen" else formulas.ADAM_BYTES * costs.trained
        rows.append([kind, size(saved), size(moment), size(state)])
    weights = size(formulas.ACTIVATION_BYTES * costs.base)
    title = f"Memory at {costs.tokens} tokens; the model's weights in bfloat16: {weights}"
    heads = ["", "saved for backward beyond x, all layers", "transient, largest", "A, B and AdamW"]
    return Section(title, content=table(heads, rows))


def expected_time(costs: LayerCosts) -> Section:
    """Expected time over LoRA's."""
    rows = []
    for overhead in formulas.OVERHEADS:
        adapted = formulas.layer_ratio(overhead, costs.tokens)
        all_linear = formulas.step_ratio(overhead, costs.tokens, costs.share)
        rows.append([overhead.name, span(*adapted), span(*all_linear)])
    heads = ["derived, not measured", "adapted layers", "all linear layers"]
    title = f"Expected time over LoRA's at {costs.tokens} tokens, forward and backward"
    return Section(title, content=table(heads, rows))


def estimate_sections(lines: Sequence[Estimate], card: Card = A100) -> list[Section]:
    """Steps, tokens, memory and hours per row; nothing without lines."""
    if not lines:
        return []
    heads = ["row", "steps", "tokens per step", "trained", "GB", "cards", "hours", "runs"]
    heads += ["in all", "disk"]
    rows = [
        [
            line.row,
            MISSING if line.steps is None else f"{line.steps:,}",
            f"{line.positions:,}",
            f"{line.trained:,}",
            f"{line.memory / 1e9:.0f}" if line.memory else MISSING,
            f"{cards(line, card)}",
            f"{line.hours:.2g}",
            f"{line.runs}",
            f"{line.hours * line.runs:.2g}",
            f"{line.stored * line.runs / 1e9:.1f}",
        ]
        for line in lines
    ]
    text = (
        f"Derived from sizes, not measured: {card.flops / 1e12:.0f} TFLOP/s at {card.used:.0%},"
        " 16 bytes per trained parameter, 2 or 4 per frozen one; tokens padded (patches of"
        " images); evaluation included, decoding at most.  Frozen copies (KL, NPO, DPO,"
        " distillation), probes and methods without steps cost more than is said here."
    )
    disk = math.fsum(line.stored * line.runs for line in lines)
    growing = 3 * FACTOR_BYTES * max((line.trained for line in lines if line.memory), default=0)
    places = (
        f"Stored weights: {disk / 1e9:,.0f} GB in all (the column disk, in GB), and up to"
        f" {growing / 1e9:,.1f} GB for the checkpoint of each training under way.  Main memory:"
        f" {max(line.read for line in lines) / 1e9:,.1f} GB per process while weights are read,"
        " beside Python and data."
    )
    title = f"On {card.name}: {total_hours(lines):,.1f} hours in all, one run after the other"
    return [Section(title, (text, places), table(heads, rows))]


def cards(line: Estimate, card: Card) -> int:
    """Cards whose memory a row needs; hours are of one as fast."""
    return max(1, -(-int(line.memory) // int(card.gigabytes * 1e9)))
