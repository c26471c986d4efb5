"""The verdict that stands first in a deletion report, and ``--strict``."""

from __future__ import annotations

import pytest

from stable_forgetting.benchmarks.apply.report import verdict


def judged(was, now, kept=None, goal=0.0):
    before, after = {"forget": {"accuracy": was}}, {"forget": {"accuracy": now}}
    if kept is not None:
        before["retain"], after["retain"] = {"accuracy": 90.0}, {"accuracy": kept}
    return verdict(before, after, "accuracy", goal)


@pytest.mark.parametrize(
    ("was", "now", "kept", "goal", "head"),
    [
        (
            71.0,
            67.0,
            90.0,
            0.0,
            "Hardly changed, retained kept: accuracy on forget data 71.0 -> 67",
        ),
        (91.0, 2.0, 89.0, 0.0, "Forgotten, retained kept: "),
        (91.0, 2.0, 60.0, 0.0, "Forgotten, retained damaged: "),
        (91.0, 40.0, None, 0.0, "Partly forgotten: accuracy"),
        (99.0, 81.0, 90.0, 80.0, "Forgotten, retained kept: "),
        (40.0, 10.0, 90.0, 50.0, "Hardly changed"),
    ],
)
def test_the_verdict_goes_by_the_way_to_the_goal(was, now, kept, goal, head):
    made = judged(was, now, kept, goal)
    assert made["line"].startswith(head)
    assert "80 % of the way" in made["line"] and "more than 5 points" in made["line"]
    assert made["word"] == head.split(",")[0].split(":")[0].lower()
