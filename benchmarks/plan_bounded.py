"""``unlearn show bounded [--plan MODEL]``: what the layer is, and what it costs on a known model.

Models are built from their published sizes on the meta device: nothing is downloaded or allocated.
The formulas are in :mod:`benchmarks.bounded_costs`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks import bounded_costs as costs
from benchmarks.bounded_costs import Layers
from benchmarks.tables import rich_table
from common.config import did_you_mean
from common.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

NAME = "bounded"
PLACEMENTS = ("mlp", "attention", "all")
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


@dataclass(frozen=True)
class Family:
    """Models that are built alike.

    Attributes:
        library: ``timm``, or a prefix of transformers' class names.
        mlp: Glob patterns of the MLP's linear layers.
        attention: Glob patterns of the attention's.
        base: What the number of parameters includes.
    """

    library: str
    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    base: str = "embeddings and head included"

    def patterns(self, placement: str) -> tuple[str, ...]:
        """Patterns of a placement."""
        chosen = {"mlp": self.mlp, "attention": self.attention, "all": self.mlp + self.attention}
        return chosen[placement]


LLAMA = Family("Llama", ("*.mlp.*_proj",), ("*.self_attn.*_proj",))
PHI = Family("Phi", ("*.mlp.fc?",), ("*.self_attn.*_proj", "*.self_attn.dense"))
GPT_NEO = Family(
    "GPTNeo",
    ("*.mlp.c_fc", "*.mlp.c_proj"),
    ("*.attention.*_proj",),
    "embeddings included, the head tied to them",
)
VIT = Family("timm", ("*.mlp.fc?",), ("*.attn.qkv", "*.attn.proj"), "with a head of 10 classes")


def _llama(hidden: int, mlp: int, depth: int, heads: int, keys: int, words: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": words,
        "tie_word_embeddings": False,
    }


def _gpt_neo(hidden: int, depth: int, heads: int) -> dict[str, Any]:
    kinds = [[["global", "local"], depth // 2]]
    return {
        "hidden_size": hidden,
        "num_layers": depth,
        "num_heads": heads,
        "attention_types": kinds,
    }


MODELS: Mapping[str, tuple[Family, dict[str, Any]]] = {
    "llama-2-7b": (LLAMA, _llama(4096, 11008, 32, 32, 32, 32000)),
    "llama-2-70b": (LLAMA, _llama(8192, 28672, 80, 64, 8, 32000)),
    "llama-3.1-8b": (LLAMA, _llama(4096, 14336, 32, 32, 8, 128256)),
    "llama-3.1-70b": (LLAMA, _llama(8192, 28672, 80, 64, 8, 128256)),
    "phi-1.5": (
        PHI,
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 51200,
        },
    ),
    "gpt-neo-125m": (GPT_NEO, _gpt_neo(768, 12, 12)),
    "gpt-neo-1.3b": (GPT_NEO, _gpt_neo(2048, 24, 16)),
    "gpt-neo-2.7b": (GPT_NEO, _gpt_neo(2560, 32, 20)),
    "vit-s": (VIT, {"model_name": "vit_small_patch16_224", "num_classes": 10}),
    "vit-b": (VIT, {"model_name": "vit_base_patch16_224", "num_classes": 10}),
    "vit-l": (VIT, {"model_name": "vit_large_patch16_224", "num_classes": 10}),
}


@dataclass(frozen=True)
class Plan:
    """Adapters on one model.

    Attributes:
        model: Its name.
        base: Parameters without adapters.
        linear: Weights of all linear layers.
        layers: What is adapted, by shape.
        rank: r.
        tokens: N of one forward pass.
        placement: Which layers were asked for.
    """

    model: str
    base: int
    linear: int
    layers: tuple[Layers, ...]
    rank: int
    tokens: int
    placement: str

    @property
    def trained(self) -> int:
        """Parameters of the adapters."""
        return costs.adapter_parameters(self.layers, self.rank)

    @property
    def percent(self) -> float:
        """Of the parameters without adapters."""
        return 100 * self.trained / self.base

    @property
    def percent_of_all(self) -> float:
        """Of the parameters with adapters, as PEFT prints it."""
        return 100 * self.trained / (self.base + self.trained)

    @property
    def share(self) -> float:
        """Of the linear layers' weights, what is adapted."""
        return sum(layer.weights for layer in self.layers) / self.linear


def make_plan(model: str, *, rank: int = 8, tokens: int = 4096, placement: str = "mlp") -> Plan:
    """Counts a known model's layers on the meta device.

    Raises:
        ConfigError: There is no such model or placement, or a size is not positive.
    """
    if model not in MODELS:
        hint = did_you_mean(model, [*MODELS])
        raise ConfigError(f"--plan {model}: no such model{hint}")
    if placement not in PLACEMENTS:
        raise ConfigError(f"--placement {placement}: choose {', '.join(PLACEMENTS)}")
    family, sizes = MODELS[model]
    built = _on_meta(family, sizes)
    from torch import nn

    linear = {name: m for name, m in built.named_modules() if isinstance(m, nn.Linear)}
    patterns = family.patterns(placement)
    chosen = {n: m for n, m in linear.items() if any(fnmatch.fnmatch(n, p) for p in patterns)}
    assert chosen, f"{model}: {patterns} match nothing"
    return Plan(
        model=model,
        base=sum(parameter.numel() for parameter in built.parameters()),
        linear=sum(module.weight.numel() for module in linear.values()),
        layers=_by_shape(chosen),
        rank=rank,
        tokens=tokens,
        placement=placement,
    )


def _on_meta(family: Family, sizes: Mapping[str, Any]) -> nn.Module:
    import torch

    with torch.device("meta"):
        if family.library == "timm":
            import timm

            return timm.create_model(**sizes)
        import transformers

        config = getattr(transformers, f"{family.library}Config")(**sizes)
        return getattr(transformers, f"{family.library}ForCausalLM")(config)


def _by_shape(linear: Mapping[str, Any]) -> tuple[Layers, ...]:
    """Layers of one shape together, in the model's order."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, module in linear.items():
        k, d = module.weight.shape
        found.setdefault((k, d), []).append(name.rpartition(".")[2])
    return tuple(
        Layers(k, d, len(names), tuple(dict.fromkeys(names))) for (k, d), names in found.items()
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
    base = MODELS[plan.model][0].base
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
