"""How long a plan still takes, from what stages like those that are missing took."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from stable_forgetting.benchmarks.audits.cost import group, length, seconds_of
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.report.cells import duration
from stable_forgetting.common.base.errors import Damaged
from stable_forgetting.common.store.stages import StageStore

SETTLING = 20.0
"""Seconds in which most of a new estimate is taken over."""
SHORT = 0.1
"""Of the shortest training: what a stage that trains nothing takes as long as none was seen."""


class Remaining:
    """Seconds until a plan is complete, told so that they go down evenly.

    A stage is expected to take what others of its group (``unlearn gd_sine``) took, else what
    trainings took per epoch or step, else the mean of its kind.

    Args:
        store: Whose recorded stages are counted.
        workers: How many stages run at once.
    """

    def __init__(self, store: StageStore, workers: int):
        self._store, self._workers = store, workers
        self._plan: Plan | None = None
        self._missing: dict[str, Stage] = {}
        self._stages: dict[str, Stage] = {}
        self._seconds: dict[str, float] = {}
        self._end: float | None = None
        self._looked = 0.0

    def planned(self, plan: Plan, missing: Collection[str]) -> None:
        """Takes a plan over: what is complete says how long it took."""
        self._plan, self._missing = plan, {}
        for stage in plan.stages():
            if stage.key in missing:
                self._missing[stage.key] = stage
            else:
                self._note(stage)

    def finished(self, stage: Stage) -> None:
        """One stage is through."""
        self._missing.pop(stage.key, None)
        self._note(stage)

    def _note(self, stage: Stage) -> None:
        seconds = None
        with contextlib.suppress(Damaged):  # whoever needs the stage finds out
            seconds = seconds_of(self._store, stage)
        if seconds is not None:
            self._stages[stage.key], self._seconds[stage.key] = stage, seconds

    def seconds(
        self, now: float, running: Mapping[str, tuple[float, float | None]]
    ) -> float | None:
        """Seconds to go at a point of a clock, settled; None where nothing is known yet.

        Args:
            now: Of the clock.
            running: Key of a stage that trains -> seconds so far, seconds left of its training.
        """
        estimate = self._estimate(running)
        if estimate is None:
            return None
        if self._end is None:
            self._end = now + estimate
        else:
            weight = 1 - math.exp((self._looked - now) / SETTLING)
            self._end += weight * (now + estimate - self._end)
        self._looked = now
        return max(0.0, self._end - now)

    def _estimate(self, running: Mapping[str, tuple[float, float | None]]) -> float | None:
        """What is missing, shared by the workers, but no less than its longest chain."""
        samples = [
            (self._missing[key], spent + left)
            for key, (spent, left) in running.items()
            if left is not None and key in self._missing
        ]
        samples += [(self._stages[key], seconds) for key, seconds in self._seconds.items()]
        expect = _Expectation(samples)
        if not expect.covers(self._missing.values()):
            return None
        left: dict[str, float] = {}
        for key, stage in self._missing.items():
            spent, training = running.get(key, (0.0, None))
            left[key] = max(0.0, expect(stage) - spent) if training is None else training

        @functools.cache
        def chain(key: str) -> float:
            parents = (p.key for p in self._missing[key].parents.values())
            return left[key] + max((chain(k) for k in parents if k in left), default=0.0)

        longest = max(map(chain, left), default=0.0)
        return max((math.fsum(left.values()) + self._unplanned(expect)) / self._workers, longest)

    def _unplanned(self, expect: _Expectation) -> float:
        """Of the models that wait for tuning or a grid: each as long as one that is planned."""
        plan = self._plan
        assert plan is not None
        models = plan.undrawn + len(plan.waiting) * len(plan.suite.spec.seeds)
        if not models:
            return 0.0
        trials = [result.stage for result in plan.results if result.trial not in (None, -1)]
        trials += [block.stage for block in plan.blocks]
        each = [_branch(stage) for stage in trials]
        return models * math.fsum(expect(s) for branch in each for s in branch) / max(1, len(each))


class _Expectation:
    """Seconds that a stage is expected to take, from the seconds of others."""

    def __init__(self, samples: Sequence[tuple[Stage, float]]):
        self._group, self._kind, self._unit = (
            defaultdict[str, list[float]](list) for _ in range(3)
        )
        for stage, seconds in samples:
            self._group[group(stage)].append(seconds)
            self._kind[stage.kind].append(seconds)
            count, unit = length(stage)
            if unit:
                self._unit[unit].append(seconds / max(1, count))
        trained = [v for kind, v in self._kind.items() if KINDS[kind].trains]
        self._shortest = min((min(values) for values in trained), default=0.0)

    def covers(self, stages: Iterable[Stage]) -> bool:
        """Whether there is a training to go by, or no training to come."""
        trains = any(KINDS[stage.kind].trains for stage in stages)
        return bool(self._shortest if trains else self._kind)

    def __call__(self, stage: Stage) -> float:
        count, unit = length(stage)
        for scale, values in (
            (1, self._group.get(group(stage))),
            (count, self._unit.get(unit)),
            (1, self._kind.get(stage.kind)),
        ):
            if values:
                return scale * math.fsum(values) / len(values)
        return self._shortest * (1.0 if KINDS[stage.kind].trains else SHORT)


def _branch(stage: Stage) -> Sequence[Stage]:
    """A result's stages down to what was trained last."""
    branch = [stage]
    while not KINDS[branch[-1].kind].trains and branch[-1].parents:
        parents = branch[-1].parents
        branch.append(parents.get("scores") or parents.get("model") or next(iter(parents.values())))
    return branch


def words(seconds: float | None) -> str:
    """``~4 min left``, in steps that do not flicker; empty where nothing is known."""
    if seconds is None:
        return ""
    step = 5 if seconds < 100 else 60 if seconds < 3600 else 360
    return f"~{duration(max(step, step * round(seconds / step)))} left"
