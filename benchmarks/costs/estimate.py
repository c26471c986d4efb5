"""Steps, tokens, memory and hours of a suite on a card, derived from sizes; nothing is measured.

The model, after Kaplan et al. (arXiv 2001.08361) and Korthikanti et al. (arXiv 2205.05198):

- a forward pass is 2 FLOPs per position and weight of a linear layer, and 2 T d per block for the
  scores of T positions at width d; the backward pass is twice that, for frozen weights once;
- a bounded layer adds products per adapted weight: one in the backward pass if merged, three with
  ``mode: split``, four if activations are recomputed; LoRA and the polynomial add skinny ones;
- recomputed activations are one forward pass more;
- weights in float32 are evaluated in TF32, and trained in float32 unless under autocast;
- what several micro-batches share of a bounded layer is its whole weight;
- a whole model is stored as its weights are, an adapter in float32, a published model not at all;
- a quantised base packs the weights of its blocks: NF4 takes .52 bytes each, with their scales;
- a parameter that is trained is float32: itself, its gradient and AdamW's two moments, 16 bytes;
  under autocast to bfloat16 its copy, 2 more; moments of 8 bits take 2 bytes, paged ones none;
- activations are 34 bytes per position, width and block in bfloat16; recomputed ones 2, and one
  block's 34.  Logits are 10 bytes per position and entry: float32, its softmax, two bytes each way;
- FILA's pass holds of each adapted weight a gradient and one Fisher in float32 on the card, another
  in main memory, and recomputes nothing; a row holds the more of that and of its training;
- greedy decoding reads all weights once per step.

Epochs of no named part are passes over all that a method reads, one batch a step: too many for Bad
Teacher, half the work of NegGrad+ and SFR-on.

What is not in it: frozen copies of a model (KL, NPO, DPO, distillation), passes of methods without
steps, probes, pretrainings on texts, data, compilation, and cards in parallel.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from stable_forgetting.benchmarks.costs.bounded import ADAM_BYTES, FACTOR_BYTES
from stable_forgetting.benchmarks.report.cells import MISSING
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.protocol.sizes import Workload, adapter_parameters
from stable_forgetting.common.train.config import FitConfig, evaluation_steps, total_steps

CARD = SimpleNamespace(
    name="A100, 80 GB",
    flops=312e12,
    tf32=156e12,
    float32=19.5e12,
    used=0.35,
    bandwidth=0.6 * 2.0e12,
    gigabytes=80,
)
"""An accelerator: peak FLOP/s of dense products in bfloat16, in TF32 and in float32, the share of
the peak that training is assumed to reach, bytes per second of its memory, at the share that
decoding is assumed to reach, and its memory."""
SMALL = 10_000_000
"""Models of fewer parameters are for a CPU: nothing is estimated."""
_RECOMPUTE = "gradient_checkpointing"
MOMENTS = {"adamw_8bit": 2, "paged_adamw_32bit": 0, "paged_adamw_8bit": 0}
"""Bytes on the card of AdamW's two moments per parameter, where they are not 8."""
PAGED = {"paged_adamw_32bit": 8, "paged_adamw_8bit": 2}
"""Those that may lie in main memory."""
ACTIVATION, KEPT, LOGIT, COPY, FISHER = 34, 2, 10, 2, 4
"""Bytes of the model above."""


@dataclass(frozen=True)
class Estimate:
    """What one row costs.

    Attributes:
        steps: Of one training; None where the method has no length in steps, or nothing is trained.
        positions: Of one step: tokens or patches.
        trained: Parameters.
        memory: Bytes.
        hours: Of one training and its evaluations.
        runs: Trainings, trials included.
        stored: Bytes on disk of one run's weights.
        read: Bytes of main memory while the weights that it starts from are read, and of moments
            that are paged there, or of a Fisher that waits there.
    """

    row: str
    steps: int | None
    positions: int
    trained: int
    memory: float
    hours: float
    runs: int
    stored: float
    read: float


def estimates(suite: ResolvedSuite) -> list[Estimate]:
    """A line per row and fold; empty where the sizes are not known, or those of a CPU."""
    benchmark, lines = BENCHMARKS[suite.spec.benchmark], []
    pretraining = benchmark.pretraining(suite.protocol)
    work = benchmark.workload(pretraining) if pretraining else None
    if work is not None:
        parts = {"train": sum(work.parts.values())}
        lines.append(_line("pretrain", pretraining.train, work, parts, 1))
    for fold in (*suite.folds, suite):
        work = benchmark.workload(fold.protocol)
        if work is None or work.sizes.parameters < SMALL:
            return []
        for row in fold.rows:
            label, runs = f"{row.label} {fold.fold}".rstrip(), _runs(fold, row)
            lines.append(_line(label, _config_of(fold, row), work, _parts_of(row, work), runs))
    return lines


def total_hours(lines: Sequence[Estimate]) -> float:
    """Of all trainings and evaluations one after the other."""
    return math.fsum(line.hours * line.runs for line in lines)


def _config_of(suite: ResolvedSuite, row: ResolvedRow) -> Any:
    """Of a row's training; None where its model is fetched."""
    protocol: Any = suite.protocol
    if row.method not in REFERENCES:
        return row.config
    return None if getattr(protocol.model, row.method, None) is not None else protocol.train


def mends(suite: ResolvedSuite, label: str) -> dict[str, float]:
    """Bytes of a row's training as it is (``""``), and with each setting that lowers them.

    Empty where they are not known.
    """
    work = BENCHMARKS[suite.spec.benchmark].workload(suite.protocol)
    row = next((row for row in suite.rows if row.label == label), None)
    config = None if row is None else _config_of(suite, row)
    if work is None or work.sizes.parameters < SMALL or not isinstance(config, FitConfig):
        return {}
    assert row is not None
    parts, layers, fit = len(_parts_of(row, work)), _adapted(config, work), FitConfig.of(config)

    def held(work: Workload, fit: FitConfig, layers: Any, trained: int) -> float:
        return _memory(work, fit, parts, trained, layers, config)

    trained = _trained(config, work, layers)
    found = {"": held(work, fit, layers, trained)}
    single = fit.model_copy(update={"accumulation": fit.batch_size})
    found[f"accumulation: {fit.batch_size}"] = held(work, single, layers, trained)
    small = fit.model_copy(update={"optimizer": "paged_adamw_8bit"})
    found["optimizer: paged_adamw_8bit"] = held(work, small, layers, trained)
    if hasattr(suite.protocol, "model") and hasattr(suite.protocol.model, _RECOMPUTE):
        again = replace(work, checkpointing=True)
        found[f"protocol.model.{_RECOMPUTE}: true"] = held(again, fit, layers, trained)
    if trained == work.sizes.parameters:
        few = adapter_parameters(work.sizes.matched(work.targets.get("mlp", ())), 8)
        states = (ADAM_BYTES + COPY) * (trained - few)
        found["LoRA of rank 8"] = found[""] - states + weights_bytes(work)
        activations = held(work, fit, layers, 0)
        found["FSDP on 8 cards"] = activations + (found[""] - activations) / 8
        found["FSDP with CPU offload"] = activations
    return {name: size for name, size in found.items() if not name or size < found[""]}


def _line(label: str, config: Any, work: Workload, parts: Mapping[str, int], runs: int) -> Estimate:
    """Of a training with a config, on samples of parts."""
    fit, steps, positions, evaluations = None, None, 0, 1
    if isinstance(config, FitConfig):
        fit = FitConfig.of(config)
        passed = {"all": sum(parts.values())} if fit.epochs and not fit.epochs_of else parts
        loaders: Any = {
            name: SimpleNamespace(samples=n, batches_per_epoch=-(-n // fit.micro_batch))
            for name, n in passed.items()
        }
        steps = total_steps(fit, loaders)
        positions = fit.batch_size * work.positions * len(loaders)
        if every := evaluation_steps(fit, loaders)[0]:
            evaluations += -(-steps // every)  # and after the last step
    layers = _adapted(config, work)
    trained = _trained(config, work, layers)
    low = work.half or (fit is not None and fit.mixed_precision != "no")
    flops = (steps or 0) * positions * _training(work, config, layers)
    seconds = flops / ((CARD.flops if low else CARD.float32) * CARD.used)
    seconds += evaluations * _evaluation(work)
    memory = _memory(work, fit, len(parts), trained, layers, config) if fit else 0.0
    read = weights_bytes(work)
    stored = trained * FACTOR_BYTES if layers else read * (config is not None)
    read += trained * PAGED.get(fit.optimizer, 0) if fit else 0
    if getattr(config, "fila", None):
        read = max(read, FISHER * sum(k * d for k, d in layers.values()))
    return Estimate(label, steps, positions, trained, memory, seconds / 3600, runs, stored, read)


def weights_bytes(work: Workload) -> float:
    """Of a model as it is stored, and as it is read into main memory."""
    wide = 2 if work.half else 4
    blocks = work.sizes.matched(work.targets.get("all", ())) if work.quantised else {}
    packed = sum(k * d for k, d in blocks.values())
    return (work.sizes.parameters - packed) * wide + packed * work.quantised


def _parts_of(row: ResolvedRow, work: Workload) -> dict[str, int]:
    """Part -> samples of what a row trains on."""
    if row.method == "original":
        return {"train": sum(work.parts.values())}
    access = METHODS[row.method].info.access
    return {name: n for name, n in work.parts.items() if name in access or not access}


def _adapted(config: Any, work: Workload) -> dict[str, tuple[int, int]]:
    adapter = getattr(config, "adapter", None)
    if adapter is None:
        return {}
    return work.sizes.matched(adapter.targets or work.targets.get(adapter.placement, ()))


def _trained(config: Any, work: Workload, layers: Mapping[str, tuple[int, int]]) -> int:
    """Parameters; of patterns, the weights of linear layers that fit one."""
    if layers:
        return adapter_parameters(layers, config.adapter.rank)
    patterns = getattr(config, "parameters", None) or ("*",)
    if "*" in patterns:
        return work.sizes.parameters
    weights = {f"{name}.weight": shape for name, shape in work.sizes.linear.items()}
    chosen = {name for pattern in patterns for name in fnmatch.filter(weights, pattern)}
    return sum(math.prod(weights[name]) for name in chosen)


def _forward(work: Workload) -> float:
    """FLOPs per position."""
    return 2 * work.sizes.weights + 2 * work.positions * work.sizes.width * work.sizes.depth


def _training(work: Workload, config: Any, layers: Mapping[str, tuple[int, int]]) -> float:
    """FLOPs per position: forward, recomputed forward, gradients of inputs and of parameters."""
    forward = _forward(work)
    passes = (3 if work.checkpointing else 2) * forward
    if not layers:
        return passes + forward
    columns = _columns(config.adapter)
    if columns is not None:
        return passes + 6 * adapter_parameters(layers, columns)
    apart = 2 + work.checkpointing if config.adapter.mode != "merged" else 0
    return passes + 2 * (1 + apart) * sum(k * d for k, d in layers.values())


def _columns(adapter: Any) -> int | None:
    """Columns of an update that is a low-rank product, at degrees 1 and 3; None for others."""
    rank: int = adapter.rank
    if adapter.phi == "identity":
        return rank
    return rank + math.comb(rank + 2, 3) if adapter.polynomial else None


def _evaluation(work: Workload) -> float:
    """Seconds."""
    flops = CARD.flops if work.half else CARD.tf32
    read = weights_bytes(work) / CARD.bandwidth
    return work.scored * _forward(work) / (flops * CARD.used) + work.decoded * read


def _memory(
    work: Workload,
    fit: FitConfig,
    parts: int,
    trained: int,
    layers: Mapping[str, tuple[int, int]],
    config: Any,
) -> float:
    """Bytes: weights, gradients and moments, activations and logits of a micro-batch."""
    sizes, autocast = work.sizes, work.half or fit.mixed_precision != "no"
    frozen = 0.0
    if layers or 0 < trained < sizes.parameters:
        frozen = weights_bytes(work) + sizes.parameters * COPY * (autocast and not work.half)
    if layers and fit.accumulation > 1 and _columns(config.adapter) is None:
        frozen += sum(k * d for k, d in layers.values()) * (2 if autocast else 4)
    states = trained * (ADAM_BYTES - 8 + MOMENTS.get(fit.optimizer, 8) + COPY * autocast)
    positions = fit.micro_batch * parts * work.longest
    blocks = ACTIVATION * sizes.depth
    if work.checkpointing:
        blocks = KEPT * sizes.depth + ACTIVATION
    wide = 1 if autocast else 2
    held = frozen + states + positions * (wide * sizes.width * blocks + LOGIT * sizes.outputs)
    return max(held, _fisher_pass(work, config, layers))


def _fisher_pass(work: Workload, config: Any, layers: Mapping[str, tuple[int, int]]) -> float:
    """Bytes while FILA looks for the start of adapters; 0 without it."""
    fila = getattr(config, "fila", None)
    if fila is None:
        return 0.0
    sizes, wide = work.sizes, 2 if work.half else 4
    of_layers = sum(k * d for k, d in layers.values()) * (wide + FISHER)
    position = wide / 2 * sizes.width * ACTIVATION * sizes.depth + LOGIT * sizes.outputs
    return weights_bytes(work) + of_layers + fila.batch_size * work.longest * position


def _runs(suite: ResolvedSuite, row: ResolvedRow) -> int:
    """Trainings of a row: on every seed, and of its trials or cells."""
    spec, seeds = suite.spec, len(suite.spec.seeds)
    if row.grid:
        return len(row.grid.points) * seeds
    tuned = len(spec.tune.seeds) if spec.tune else 0
    if row.method in REFERENCES:
        tuned = tuned if row.method in suite.trial_rule.needs else 0
        return seeds * (spec.retrains if row.method == "retrain" else 1) + tuned
    return seeds + (row.search.trials * tuned if row.search else 0)


# What is shown -----------------------------------------------------------------------------------


def estimate_sections(lines: Sequence[Estimate]) -> list[Section]:
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
            f"{max(1, -(-int(line.memory) // int(CARD.gigabytes * 1e9)))}",
            f"{line.hours:.2g}",
            f"{line.runs}",
            f"{line.hours * line.runs:.2g}",
            f"{line.stored * line.runs / 1e9:.1f}",
        ]
        for line in lines
    ]
    text = (
        f"Derived from sizes, not measured: {CARD.flops / 1e12:.0f} TFLOP/s at {CARD.used:.0%},"
        " 16 bytes per trained parameter, 2 or 4 per frozen one; tokens padded (patches of"
        " images); evaluation included, decoding at most.  Frozen copies (KL, NPO, DPO,"
        " distillation), probes and methods without steps cost more than is said here."
    )
    disk = math.fsum(line.stored * line.runs for line in lines)
    growing = 3 * FACTOR_BYTES * max((line.trained for line in lines if line.memory), default=0)
    places = (
        f"Stored weights: {disk / 1e9:,.0f} GB in all (the column disk, in GB), and up to"
        f" {growing / 1e9:,.1f} GB for the checkpoint of each training under way.  Main memory:"
        f" {max(line.read for line in lines) / 1e9:,.1f} GB per process while weights are read"
        " or a Fisher waits, beside Python and data."
    )
    title = f"On {CARD.name}: {total_hours(lines):,.1f} hours in all, one run after the other"
    return [Section(title, (text, places), table(heads, rows))]
