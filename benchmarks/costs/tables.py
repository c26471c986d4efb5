"""Tables of what the bounded layer costs, for ``unlearn show bounded``."""

from __future__ import annotations

from rich.console import Console

from benchmarks.costs import layer as costs
from benchmarks.costs.model import MODELS, Plan
from benchmarks.report.table import rich_table

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


# Tables ------------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]


def show_bounded(console: Console, plan: Plan | None) -> None:
    """The layer, and the tables of a plan."""
    console.print(FORMULA, highlight=False, markup=False)
    if plan is None:
        names = ", ".join(MODELS)
        console.print(f"\nCosts on a model: unlearn show bounded --plan MODEL\nmodels  {names}")
        return
    for title, heads, rows in (layer_table(plan), flop_table(plan), byte_table(plan)):
        console.print()
        console.print(rich_table(title, heads, rows))
    console.print(PAPER, highlight=False, markup=False)
    console.print()
    title, heads, rows = ratio_table(plan)
    console.print(rich_table(title, heads, rows))
    console.print(DERIVED, highlight=False, markup=False)


def layer_table(plan: Plan) -> Table:
    """What is adapted, and the parameters."""
    rows = [
        [
            ", ".join(layer.names),
            f"{layer.k} x {layer.d}",
            f"{layer.count}",
            f"{costs.adapter_parameters([layer], plan.rank):,}",
        ]
        for layer in plan.layers
    ]
    count = sum(layer.count for layer in plan.layers)
    rows.append(["adapters", "", f"{count}", f"{plan.trained:,}"])
    base = MODELS[plan.model].base
    rows.append([f"model ({base})", "", "", f"{plan.base:,}"])
    rows.append(["share of the model without adapters", "", "", f"{plan.percent:.3f} %"])
    rows.append(["share of the model with adapters", "", "", f"{plan.percent_of_all:.3f} %"])
    where = f"{plan.placement} layers, r = {plan.rank}"
    return f"{plan.model}: {where}", ["layers", "k x d", "count", "parameters"], rows


def _total(plan: Plan, kind: costs.Kind) -> costs.Flops:
    parts = [
        (layer.count, costs.flops_per_token(kind, layer.k, layer.d, plan.rank, plan.tokens))
        for layer in plan.layers
    ]
    return costs.Flops(
        sum(n * part.forward for n, part in parts),
        sum(n * part.inputs for n, part in parts),
        sum(n * part.parameters for n, part in parts),
    )


def flop_table(plan: Plan) -> Table:
    """Products of the adapted layers, per token, and the paper's count beside them."""
    lora = _total(plan, "LoRA")
    rows = []
    for kind in costs.KINDS:
        flops = _total(plan, kind)
        parts = (flops.forward, flops.inputs, flops.parameters, flops.total)
        rows.append([kind, *(_giga(part) for part in parts), f"{flops.total / lora.total:.2f}"])
    paper = sum(n.count * costs.paper_forward(n.k, n.d, plan.rank) for n in plan.layers)
    rows.append(["the paper's operations", _giga(paper), "", "", "", ""])
    title = f"Adapted layers, GFLOP per token of {plan.tokens} (products; a multiply-add is 2)"
    return title, ["", "forward", "dx", "parameters", "total", "of LoRA"], rows


def byte_table(plan: Plan) -> Table:
    """Memory of the adapted layers."""
    rows = []
    for kind in costs.KINDS:
        sizes = [(n.count, (kind, n.k, n.d, plan.rank, plan.tokens)) for n in plan.layers]
        saved = sum(count * costs.saved_bytes(*size) for count, size in sizes)
        moment = max(costs.transient_bytes(*size) for _, size in sizes)
        state = 0 if kind == "frozen" else costs.ADAM_BYTES * plan.trained
        rows.append([kind, _bytes(saved), _bytes(moment), _bytes(state)])
    weights = _bytes(costs.ACTIVATION_BYTES * plan.base)
    title = f"Memory at {plan.tokens} tokens; the model's weights in bfloat16: {weights}"
    heads = ["", "saved for backward beyond x, all layers", "transient, largest", "A, B and AdamW"]
    return title, heads, rows


def ratio_table(plan: Plan) -> Table:
    """Expected time over LoRA's."""
    rows = []
    for overhead in costs.OVERHEADS:
        ranges = (
            costs.layer_ratio(overhead, plan.tokens),
            costs.step_ratio(overhead, plan.tokens, plan.share),
        )
        rows.append([overhead.name, *(_range(*pair) for pair in ranges)])
    heads = ["derived, not measured", "adapted layers", "all linear layers"]
    title = f"Expected time over LoRA's at {plan.tokens} tokens, forward and backward"
    return title, heads, rows


def _range(low: float, high: float) -> str:
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}-{high:.2f}"


def _giga(value: float) -> str:
    return f"{value / 1e9:.4g}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.4g} GB"
