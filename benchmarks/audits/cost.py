"""What an audit's trainings would cost, from what such stages took before.  Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.stage import ModelSpec, Plan, Stage
from stable_forgetting.benchmarks.report.cells import duration
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.store.stages import StageStore


@dataclass(frozen=True)
class Cost:
    """What stages of one kind would cost.

    Attributes:
        kind: Stage kind, for ``unlearn`` with the row's label.
        length: Of one, such as ``12 epochs``; empty where it trains nothing.
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
    """Stages by kind (unlearning by row); seconds of the ``recorded`` stages count too."""
    groups: dict[str, list[Stage]] = {}
    complete: dict[str, dict[str, Stage]] = {}
    for stage in plan.stages():
        groups.setdefault(group(stage), []).append(stage)
    for stage in [*plan.stages(), *recorded]:
        if store.done(stage.kind, stage.key) is not None:
            complete.setdefault(group(stage), {})[stage.key] = stage
    result = []
    for kind, stages in groups.items():
        missing = sum(store.done(stage.kind, stage.key) is None for stage in stages)
        done = list(complete.get(kind, {}).values())
        seconds = _of_missing(missing, [seconds_of(store, stage) for stage in done])
        size = _of_missing(missing, [megabytes(store, stage) for stage in done])
        long, unit = length(stages[0])
        text = f"{long} {unit.removesuffix('s') if long == 1 else unit}" if unit else ""
        result.append(Cost(kind, len(stages), missing, text, seconds, size))
    return result


def time_line(priced: Sequence[Cost]) -> str:
    """How long the missing stages take, and which of them were never run here."""
    unknown = [cost.kind for cost in priced if cost.missing and cost.seconds is None]
    total = sum(cost.seconds or 0.0 for cost in priced)
    text = f"About {duration(total)} of one process for what is missing"
    text += f", without {', '.join(unknown)} (never run here)" if unknown else ""
    return f"{text}, from the recorded seconds of such stages."


def _of_missing(count: int, known: Sequence[float | None]) -> float | None:
    """What as many stages take, if each takes the mean of the known ones."""
    present = [value for value in known if value is not None]
    if count == 0:
        return 0.0
    return count * fmean(present) if present else None


def group(stage: Stage) -> str:
    """The kind; of a method's trainings with its name."""
    method = _method(stage)
    return f"{stage.kind} {method}" if method not in (None, *REFERENCES) else stage.kind


def _method(stage: Stage) -> str | None:
    """What a stage trains a model with; None where it trains none."""
    spec = stage.spec
    return spec.method if KINDS[stage.kind].trains and isinstance(spec, ModelSpec) else None


def seconds_of(store: StageStore, stage: Stage) -> float | None:
    """What a complete stage took; None where it says nothing of it."""
    done = store.done(stage.kind, stage.key)
    value = (done or {}).get("stage_seconds")
    return float(value) if isinstance(value, int | float) else None


def megabytes(store: StageStore, stage: Stage) -> float:
    """What a complete stage holds on disk, the scores of a trajectory among it."""
    files = store.folder(stage.kind, stage.key).rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**20


def length(stage: Stage) -> tuple[int, str]:
    """How many epochs or steps one training stage is long; of no unit for others."""
    method = _method(stage)
    if method is None:
        return 0, ""
    assert isinstance(stage.spec, ModelSpec)
    config = stage.spec.params
    if method in REFERENCES:
        config = stage.spec.protocol.get("train", {})
    for unit in ("epochs", "steps"):
        if config.get(unit) is not None:
            return config[unit], unit
    return 0, ""
