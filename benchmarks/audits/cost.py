"""What an audit's trainings would cost, from what such stages took before.  Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pipeline.stage import Plan, Stage
from benchmarks.spec.resolve import ResolvedSuite
from common.base.config import canonical
from common.store.stages import StageStore


@dataclass(frozen=True)
class Cost:
    """What stages of one kind would cost.

    Attributes:
        kind: Stage kind, for ``unlearn`` with the row's label.
        planned: Stages.
        missing: Of these, not in the store.
        length: Epochs or steps of one, in words.
        seconds: Estimate for the missing ones, from recorded stages of the kind; None if unknown.
        megabytes: The same for their size on disk.
    """

    kind: str
    planned: int
    missing: int
    length: str
    seconds: float | None
    megabytes: float | None


def costs(plan: Plan, store: StageStore, recorded: Sequence[Stage]) -> list[Cost]:
    """Stages by kind (unlearning by row), with estimates from what was recorded.

    Args:
        plan: What would run.
        store: What is there.
        recorded: Further stages whose recorded seconds count, such as the suite's own.
    """
    groups: dict[str, list[Stage]] = {}
    known: dict[str, dict[str, Stage]] = {}
    for stage in plan.stages():
        groups.setdefault(_group(stage), []).append(stage)
    for stage in [*plan.stages(), *recorded]:
        if store.done(stage.kind, stage.key) is not None:
            known.setdefault(_group(stage), {})[stage.key] = stage
    result = []
    for kind, stages in groups.items():
        missing = sum(store.done(stage.kind, stage.key) is None for stage in stages)
        done = list(known.get(kind, {}).values())
        seconds = _mean([_seconds(store, stage) for stage in done])
        size = _mean([_megabytes(store.folder(stage.kind, stage.key)) for stage in done])
        result.append(
            Cost(
                kind,
                len(stages),
                missing,
                _length(plan.suite, stages[0]),
                _times(seconds, missing),
                _times(size, missing),
            )
        )
    return result


def _times(each: float | None, count: int) -> float | None:
    if count == 0:
        return 0.0
    return None if each is None else each * count


def _group(stage: Stage) -> str:
    return f"unlearn {stage.spec['method']}" if stage.kind == "unlearn" else stage.kind


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


def _seconds(store: StageStore, stage: Stage) -> float | None:
    done = store.done(stage.kind, stage.key)
    value = (done or {}).get("stage_seconds")
    return float(value) if isinstance(value, int | float) else None


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 2**20


def _length(suite: ResolvedSuite, stage: Stage) -> str:
    """``12 epochs`` or ``100 steps`` of one training stage; empty for others."""
    config: Any = None
    if stage.kind in ("original", "retrain"):
        config = canonical(suite.protocol).get("train")
    elif stage.kind == "unlearn":
        config = stage.spec["params"]
    for unit in ("epochs", "steps"):
        if isinstance(config, Mapping) and config.get(unit) is not None:
            count = config[unit]
            return f"{count} {unit.removesuffix('s') if count == 1 else unit}"
    return ""
