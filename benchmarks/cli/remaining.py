"""How long a plan still takes, from what stages like those that are missing took."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping

from stable_forgetting.benchmarks.audits.cost import group, length, seconds_of
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.report.cells import duration
from stable_forgetting.common.base.errors import Damaged
from stable_forgetting.common.store.stages import StageStore

TRAINED = "of all trainings"
SHORT = 0.1
"""Of the shortest training: what a stage that trains nothing takes as long as none was seen."""


class Remaining:
    """Seconds until a plan is complete, shared by the workers.

    A stage is expected to take what others of its group (``unlearn gd_sine``) took, else what
    trainings took per epoch or step, else others of its kind.

    Args:
        store: Whose recorded stages are counted.
        workers: How many stages run at once.
    """

    def __init__(self, store: StageStore, workers: int):
        self._store, self._workers = store, workers
        self._missing: dict[str, Stage] = {}
        self._took: dict[str, list[float]] = defaultdict(list)
        self._unplanned = 0

    def planned(self, plan: Plan, missing: Collection[str]) -> None:
        """Takes a plan over: what is complete says how long it took."""
        self._unplanned = plan.undrawn + len(plan.waiting) * len(plan.suite.spec.seeds)
        self._missing, self._took = {}, defaultdict(list)
        for stage in plan.stages():
            if stage.key in missing:
                self._missing[stage.key] = stage
            else:
                self.finished(stage)

    def finished(self, stage: Stage) -> None:
        """One stage is through."""
        self._missing.pop(stage.key, None)
        with contextlib.suppress(Damaged):  # whoever needs the stage finds out
            seconds = seconds_of(self._store, stage)
            if seconds is not None:
                for name, scale in _groups(stage).items():
                    self._took[name].append(seconds / scale)

    def seconds(self, running: Mapping[str, tuple[float, float | None]]) -> float | None:
        """Seconds to go; None where nothing is known yet.

        Args:
            running: Key of a stage -> seconds so far, and seconds left of its training.
        """
        known = dict(self._took)
        for key, (spent, left) in running.items():
            if left is not None and key in self._missing:
                for name, scale in _groups(self._missing[key]).items():
                    known.setdefault(name, [(spent + left) / scale])
        if not known.get(TRAINED) and any(KINDS[s.kind].trains for s in self._missing.values()):
            return None
        short = SHORT * min(known.get(TRAINED, [0.0]))
        total = self._unplanned * _mean(known.get("unlearn") or known.get(TRAINED, []))
        for key, stage in self._missing.items():
            spent, left = running.get(key, (0.0, None))
            scales = _groups(stage).items()
            expected = next((n * _mean(known[name]) for name, n in scales if name in known), short)
            total += max(0.0, expected - spent) if left is None else left
        return total / self._workers


def _groups(stage: Stage) -> dict[str, int]:
    """Names under which a stage's seconds are known, the nearest first -> their unit in it."""
    count, unit = length(stage)
    of_unit = {unit: max(1, count)} if unit else {}
    trained = {TRAINED: 1} if KINDS[stage.kind].trains else {}
    return {group(stage): 1, **of_unit, stage.kind: 1, **trained}


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def words(seconds: float | None) -> str:
    """``~4 min left``, in steps that do not flicker; empty where nothing is known."""
    if seconds is None:
        return ""
    step = 5 if seconds < 100 else 60 if seconds < 3600 else 360
    return f"~{duration(max(step, step * round(seconds / step)))} left"
