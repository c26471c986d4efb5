"""Several methods tried, one chosen: on retained samples that no trial was trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from stable_forgetting.benchmarks.apply.attempt import Attempt
from stable_forgetting.benchmarks.apply.measure import measured
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.protocol.given import SEEN, VALIDATION, GivenBenchmark

Measured = Mapping[str, Any]


def choose(
    benchmark: GivenBenchmark, before: Measured, trials: Mapping[str, Callable[[], Attempt]]
) -> tuple[Attempt, dict[str, Any]]:
    """Runs every trial and keeps the best.

    Args:
        benchmark: Prepared, with a part ``validation``.
        before: What was measured of the given model.
        trials: Method -> what runs it.

    Returns:
        The chosen attempt, and the statement's ``choice``.  The distance is the mean of how far the
        yardstick is from the goal on forget data, and of how far it fell on validation data; of
        equal ones the first is taken.
    """
    goal, key = benchmark.config.goal or 0.0, benchmark.yardstick
    wanted = {"forget": goal, VALIDATION: before[VALIDATION][key]}
    best, shortest, table = None, math.inf, []
    for method, run in trials.items():
        attempt = run()
        row: dict[str, Any] = {"method": method, "status": "diverged", "distance": None}
        values = _values(attempt, benchmark)
        row |= {"seconds": attempt.facts["cost"]["seconds"], **dict.fromkeys(SEEN), **values}
        if values:
            lost = max(0.0, wanted[VALIDATION] - values[VALIDATION])
            distance = (abs(values["forget"] - wanted["forget"]) + lost) / 2
            row |= {"status": "ok", "distance": distance}
            if distance < shortest:
                best, shortest = attempt, distance
        best = best or attempt
        table.append(row)
    assert best is not None, "there is a method to try"
    return best, {
        "rule": f"mean of the distance of {key} to the goal on forget data and of its loss on "
        f"{VALIDATION} data",
        "goal": goal,
        "given": before[VALIDATION][key],
        "held_out": len(benchmark.split(benchmark.config.seed).parts[VALIDATION]),
        "chosen": best.method,
        "trials": table,
    }


def _values(attempt: Attempt, benchmark: GivenBenchmark) -> dict[str, float]:
    """Part -> yardstick; empty where the training or what the model says diverged."""
    if attempt.model is None:
        return {}
    try:
        values = measured(benchmark, attempt.model, trial=True)
    except Diverged as error:
        attempt.model, attempt.detail = None, str(error)
        return {}
    return {part: values[part][benchmark.yardstick] for part in SEEN}
