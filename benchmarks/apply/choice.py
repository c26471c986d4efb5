"""Several methods tried, one chosen: on retained samples that no trial was trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from stable_forgetting.benchmarks.apply.attempt import Attempt
from stable_forgetting.common.base.errors import DataError, Diverged
from stable_forgetting.common.base.seeding import hash_order

if TYPE_CHECKING:
    from stable_forgetting.common.protocol.subject import Subject

VALIDATION = "validation"
SHARE = 5
"""One of this many retained samples is held out for the choice."""
SEEN = ("forget", VALIDATION)
"""The parts that the choice looks at."""
Measured = Mapping[str, Any]


def hold_out(subject: Subject) -> None:
    """Moves a part of the retained samples to ``validation``, by hash order.

    Raises:
        DataError: There are too few.
    """
    retain = subject.parts["retain"]
    if len(retain) < 2:
        raise DataError(
            f"retain: one of {SHARE} retained {subject.unit} is held out to choose among methods, "
            f"and there is only {len(retain)}; give more, or one method"
        )
    count = max(1, len(retain) // SHARE)
    held = np.sort(np.asarray(hash_order(retain.tolist(), 0, VALIDATION)[:count], dtype=np.int64))
    rest = np.setdiff1d(retain, held)
    subject.parts = {**subject.parts, "retain": rest, VALIDATION: held}


def choose(
    subject: Subject, before: Measured, trials: Mapping[str, Callable[[], Attempt]]
) -> tuple[Attempt, dict[str, Any]]:
    """Runs every trial and keeps the best.

    Args:
        subject: Loaded, with a part ``validation``.
        before: What was measured of the given model.
        trials: Method -> what runs it.

    Returns:
        The chosen attempt, and the statement's ``choice``.  The distance is the mean of how far the
        yardstick is from the goal on forget data, and of how far it fell on validation data; of
        equal ones the first is taken.
    """
    goal, key = subject.application.goal or 0.0, subject.yardstick
    wanted = {"forget": goal, VALIDATION: before[VALIDATION][key]}
    best, shortest, table = None, math.inf, []
    for method, run in trials.items():
        attempt = run()
        row: dict[str, Any] = {"method": method, "status": "diverged", "distance": None}
        values = _values(attempt, subject)
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
        "held_out": len(subject.parts[VALIDATION]),
        "chosen": best.method,
        "trials": table,
    }


def _values(attempt: Attempt, subject: Subject) -> dict[str, float]:
    """Part -> yardstick; empty where the training or what the model says diverged."""
    if attempt.model is None:
        return {}
    try:
        measured = subject.measured(attempt.model, SEEN)
    except Diverged as error:
        attempt.model, attempt.detail = None, str(error)
        return {}
    return {part: measured[part][subject.yardstick] for part in SEEN}
