"""What each row of a suite runs, after defaults, presets and the row's own params."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.train.config import FitConfig

TRAINED = ("length", "batch", "rate", "schedule", "trained in", "adapter", "loss average", "compat")
HEADS = ("row", *TRAINED)
SHOWN = frozenset(
    "steps epochs epochs_of timing batch_size accumulation optimizer lr weight_decay schedule "  # noqa: SIM905
    "warmup_steps warmup_epochs mixed_precision average adapter.phi adapter.omega adapter.rank "
    "adapter.alpha adapter.placement adapter.targets adapter.mode compat fila.compat".split()
)
"""Settings of a method that :func:`resolved_table` has columns for."""
SILENT = frozenset({"log_every", "checkpoint_every", "probe_every"})
"""Settings that decide no number."""
MORE = ("row", "tokens of a step, at most", "all other settings that are on")


def resolved_table(suite: ResolvedSuite) -> list[dict[str, str]]:
    """One line per row, by :data:`HEADS`; Original and Retrain run the protocol's recipe."""
    weights = getattr(getattr(suite.protocol, "model", None), "dtype", "float32")
    lines = []
    for row in suite.rows:
        line = {"row": row.label, **described(config_of(suite, row), weights)}
        line["length"] += " (own budget)" if row.budget == "own" else ""
        line["rate"] += f" (first of {len(row.grid.lrs)})" if row.grid else ""
        lines.append(line)
    return lines


def config_of(suite: ResolvedSuite, row: ResolvedRow) -> Any:
    """The config of a row: its own, or the recipe of the reference models."""
    return getattr(suite.protocol, "train", None) if row.method in REFERENCES else row.config


def pretraining_table(suite: ResolvedSuite) -> list[dict[str, str]]:
    """The same of what Original and Retrain start from; no line where nothing is pretrained."""
    protocol = BENCHMARKS[suite.spec.benchmark].pretraining(suite.protocol)
    if protocol is None:
        return []
    weights = getattr(protocol.model, "dtype", "float32")
    return [{"row": "pretrain", **described(protocol.train, weights)}]


def protocol_table(suite: ResolvedSuite) -> list[list[str]]:
    """(setting, value) of model, data, split and evaluation: all that the rows have in common."""
    settings = _flat(suite.protocol.model_dump())
    return [[name, value] for name, value in settings.items() if not name.startswith("train.")]


def further_table(suite: ResolvedSuite) -> list[list[str]]:
    """What decides a row's numbers beside :func:`resolved_table`, by :data:`MORE`.

    The first line has what all rows but Original and Retrain say alike, if they do.
    """
    length, lines, trained = _longest(suite), [], []
    for row in suite.rows:
        config = config_of(suite, row)
        flat = {} if config is None else _flat(config.model_dump())
        settings = {f"{k} {v}" for k, v in flat.items() if k not in SHOWN | SILENT}
        trained += [] if row.method in REFERENCES else [settings]
        size = getattr(config, "batch_size", None)
        tokens = f"{size} x {length} = {size * length:,}" if size and length else ""
        lines.append((row.label, tokens, settings))
    common = set.intersection(*trained) if len(trained) > 1 else set()
    own = [[label, tokens, ", ".join(sorted(each - common))] for label, tokens, each in lines]
    return [["all trained rows", "", ", ".join(sorted(common))], *own] if common else own


def _longest(suite: ResolvedSuite) -> int | None:
    """Tokens of the longest row of a text; None for images."""
    limit = getattr(getattr(suite.protocol, "data", None), "max_length", None)
    work = None if limit is None else BENCHMARKS[suite.spec.benchmark].workload(suite.protocol)
    return limit if work is None else min(work.longest, limit)


def _flat(settings: Mapping[str, Any], stem: str = "") -> dict[str, str]:
    """Dotted name -> value in words, of all settings that are on."""
    words: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            words |= _flat(value, f"{stem}{key}.")
        elif value not in (None, False, "none", 0) and value not in ((), []):
            several = isinstance(value, list | tuple)
            words[stem + key] = " ".join(map(str, value)) if several else str(value)
    return words


def described(config: Any, weights: str = "float32") -> dict[str, str]:
    """The cells of a method's config or a recipe by :data:`HEADS`, empty where it has no such.

    ``weights`` is the type of the model's weights.
    """
    have = type(config).model_fields
    cells = dict.fromkeys(TRAINED, "")
    cells["length"] = _length(config) if {"steps", "epochs"} & have.keys() else ""
    if "batch_size" in have:
        micro = getattr(config, "accumulation", 1)
        size = config.batch_size
        cells["batch"] = f"{size} = {micro} x {size // micro}" if micro > 1 else str(size)
    trains = isinstance(config, FitConfig)
    if "lr" in have and not trains:  # one step of that length
        cells["rate"] = f"{config.lr:g}"
    if trains:
        engine = config.engine() if hasattr(config, "engine") else config
        scaled = "" if engine.lr == config.lr else f" ({engine.lr:.3g} applied)"
        cells["rate"] = f"{config.optimizer} {config.lr:g}{scaled}, decay {config.weight_decay:g}"
        cells["schedule"] = _schedule(config)
        cells["trained in"] = _precision(config, weights)
        cells["loss average"] = config.average
    cells["adapter"] = _adapter(getattr(config, "adapter", None), trains)
    cells["compat"] = _compat(config)
    return cells


def _length(config: Any) -> str:
    if config.steps is not None:
        return f"{config.steps} steps"
    part = getattr(config, "epochs_of", None)
    return f"{config.epochs} epochs" + (f" of {part}" if part else "")


def _schedule(config: Any) -> str:
    warmup = f"{config.warmup_steps} steps" if config.warmup_steps else ""
    if config.warmup_epochs:
        warmup = f"{config.warmup_epochs:g} epochs"
    words = [config.schedule, f"warm-up {warmup}" if warmup else ""]
    words.append("" if config.timing == "own" else f"timing {config.timing}")
    return ", ".join(word for word in words if word)


def _precision(config: Any, weights: str) -> str:
    """What is trained is float32 always (:mod:`common.train.precision`)."""
    low = weights != "float32" and getattr(config, "adapter", None) is None
    autocast = "bf16" if low and config.mixed_precision == "no" else config.mixed_precision
    words = ["float32", "" if autocast == "no" else f"autocast {autocast}"]
    words.append("" if weights == "float32" else f"weights {weights}")
    return ", ".join(word for word in words if word)


def _adapter(adapter: Any, trains: bool) -> str:
    if adapter is None:
        return "whole model" if trains else ""
    inner = "" if adapter.omega == 1 else f" omega {adapter.omega:g}"
    split = "" if adapter.mode == "merged" else f" {adapter.mode}"
    place = ", ".join(adapter.targets or ()) or adapter.placement
    shape = f"r {adapter.rank} alpha {adapter.alpha:g} on {place}"
    kind = f"peft {adapter.peft}" if adapter.peft else adapter.phi
    return f"{kind}{inner} {shape}{split}"


def _compat(config: Any) -> str:
    told = {"": getattr(config, "compat", None)}
    told["fila "] = getattr(getattr(config, "fila", None), "compat", None)
    return ", ".join(f"{name}{how}" for name, how in told.items() if how not in (None, "none"))
