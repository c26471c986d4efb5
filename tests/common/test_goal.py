from __future__ import annotations

from dataclasses import replace

import pytest

from stable_forgetting.common.measure.gaps import derived, gap
from stable_forgetting.common.measure.goal import (
    ConstantGoal,
    MeasuredGoal,
    References,
    RetrainGoal,
)
from stable_forgetting.common.measure.metric import MAX_GAP
from stable_forgetting.common.measure.rules import (
    Axis,
    Criterion,
    GapRule,
    GoalRule,
    RowFacts,
    RuleSet,
)

ORIGINAL = {"el": 60.0, "el_unseen": 5.0, "utility": 50.0, "auc": 40.0}
RETRAIN = {"el": 6.0, "utility": 52.0}
REFERENCES = References(ORIGINAL, RETRAIN)
MEASURED = MeasuredGoal("el", on="el_unseen")


@pytest.mark.parametrize(
    ("goal", "value", "needs"),
    [
        (RetrainGoal("el"), 6.0, {"retrain"}),
        (MEASURED, 5.0, {"original"}),
        (ConstantGoal("el", 7.5, "a paper"), 7.5, set()),
    ],
)
def test_a_goal_has_its_value_from_where_it_says(goal, value, needs):
    assert goal.value(REFERENCES) == value and goal.needs == needs
    assert goal.reached({"el": value - 0.1}, REFERENCES) is True
    assert goal.reached({"el": value}, REFERENCES) is False, "the value itself is not enough"
    assert goal.excess({"el": 1.5 * value}, REFERENCES) == pytest.approx(0.5)
    assert goal.excess({"el": 0.0}, REFERENCES) == 0
    assert goal.words.startswith("el below ")


def test_a_goal_from_above():
    goal = ConstantGoal("auc", 50.0, "chance", reach="above")
    assert goal.reached({"auc": 51.0}, References()) is True
    assert goal.excess({"auc": 40.0}, References()) == pytest.approx(0.2)


def test_what_is_unknown_is_neither_reached_nor_missed():
    assert MEASURED.reached({"el": 1.0}, References()) is None
    assert MEASURED.reached({"el": None}, REFERENCES) is None
    assert MEASURED.excess({}, REFERENCES) is None
    assert RetrainGoal("el").value(References(ORIGINAL)) is None


RULE = GoalRule((MEASURED, ConstantGoal("auc", 30.0, "chance")), utility="utility")


def test_the_distance_is_zero_where_all_is_reached_and_nothing_lost():
    good = {"el": 4.0, "auc": 29.0, "utility": 50.0}
    assert RULE.reached(good, REFERENCES) is True
    assert RULE.distance(good, REFERENCES, trial=True) == 0
    better = {**good, "utility": 55.0}
    assert RULE.distance(better, REFERENCES, trial=False) == 0, "gained utility pays for nothing"


def test_the_distance_counts_misses_and_lost_utility():
    row = {"el": 10.0, "auc": 29.0, "utility": 47.0}
    assert RULE.reached(row, REFERENCES) is False
    assert RULE.distance(row, REFERENCES, trial=True) == pytest.approx(100 * (1.0 + 0) / 2 + 3.0)
    assert RULE.distance({**row, "utility": None}, REFERENCES, trial=True) is None
    assert RULE.reached({"el": 10.0}, REFERENCES) is False, "one miss decides"
    assert RULE.reached({"el": 1.0}, REFERENCES) is None


def test_rows_are_ordered_by_reached_then_utility_then_steps():
    facts = {
        "all, useful": RowFacts(9.0, {"utility": 40.0}, 1.0, 20),
        "all, useful, slower": RowFacts(0.0, {"utility": 40.0}, 1.0, 30),
        "all, useless": RowFacts(0.0, {"utility": 10.0}, 1.0, 5),
        "half": RowFacts(0.0, {"utility": 50.0}, 0.5, 5),
        "none": RowFacts(0.0, {"utility": 60.0}, 0.0, 5),
        "utility unknown": RowFacts(0.0, {}, 0.0, 5),
    }
    rows = {name: RULE.order(row) for name, row in facts.items()}
    assert sorted(rows, key=rows.__getitem__) == list(rows)


def test_the_rule_says_what_it_needs_and_shows():
    assert RULE.needs == {"original"} and RULE.metrics == ("el", "auc", "utility")
    assert GoalRule((RetrainGoal("el"),), utility="utility").needs == {"original", "retrain"}
    assert "el below el_unseen of Original" in RULE.words and "chance" in RULE.words


def test_a_rule_set_judges_each_criterion():
    rules = RuleSet(
        "paper", "a table", (Criterion("C1", MEASURED), Criterion("C2", RetrainGoal("utility")))
    )
    assert rules.judge({"el": 4.0, "utility": 60.0}, REFERENCES) == {"C1": True, "C2": False}
    assert rules.judge({"el": 4.0}, References()) == {"C1": None, "C2": None}
    assert rules.words == (
        "paper (a table): C1: el below el_unseen of Original; C2: utility below Retrain's"
    )


def test_a_gap_rule_is_a_rule_without_goals():
    rule = GapRule(metrics=("el", "utility"), trial=("el",))
    row = {"el": 8.0, "utility": 50.0}
    assert rule.needs == {"retrain"} and rule.goals == ()
    assert rule.distance(row, REFERENCES, trial=False) == pytest.approx(2.0)
    assert rule.distance(row, REFERENCES, trial=True) == pytest.approx(2.0)
    assert rule.distance(row, References(ORIGINAL), trial=True) is None
    assert rule.order(RowFacts(2.0, {}, 0.0, 5)) == (2.0,)


AXES = GapRule(
    metrics=("near", "far", "kept"),
    trial=("near", "kept"),
    axes=(Axis("forget", "forget", {"near": 3.0, "far": 1.0}), Axis("keep", "keep", {"kept": 1.0})),
)
RETRAINED = References(retrain={"near": -4.0, "far": -6.0, "kept": 2.0})


def test_axes_weigh_the_same_however_many_metrics_they_have():
    assert AXES.weights() == {"near": 0.375, "far": 0.125, "kept": 0.5}
    assert AXES.weights(trial=True) == {"near": 0.5, "kept": 0.5}
    row = {"near": -2.0, "far": -6.0, "kept": 1.0}
    assert AXES.contributions(row, RETRAINED) == {"near": 0.75, "far": 0.0, "kept": 0.5}
    assert AXES.distance(row, RETRAINED, trial=False) == pytest.approx(1.25)
    assert AXES.distance(row, RETRAINED, trial=True) == pytest.approx(1.5)
    assert AXES.distance({**row, "far": None}, RETRAINED, trial=False) is None
    assert AXES.distance(row, References(), trial=False) is None


KEPT = GapRule(metrics=("forgot", "kept"), trial=("forgot",), kept=("kept",))


def test_of_a_kept_metric_only_what_is_lost_is_charged():
    target, row = {"forgot": 10.0, "kept": 60.0}, {"forgot": 14.0, "kept": 90.0}
    references, lost = References(retrain=target), {**row, "kept": 40.0}
    assert KEPT.distance(row, references, trial=False) == 2.0
    assert KEPT.contributions(row, references) == {"forgot": 2.0, "kept": 0.0}
    assert KEPT.distance(lost, references, trial=False) == 12.0
    assert KEPT.contributions(lost, references) == {"forgot": 2.0, "kept": 10.0}
    for own, most in ((row, 4.0), (lost, 20.0)):
        assert derived(own, target, MAX_GAP, KEPT.metrics, KEPT.kept) == most
        assert derived(own, target, MAX_GAP, KEPT.metrics) == max(most, abs(own["kept"] - 60))
    assert gap(row, target, "kept") == 30.0, "the gap that tables print has its sign"
    assert KEPT.distance({**row, "kept": None}, references, trial=False) is None


def test_an_axis_that_lacks_a_metric_keeps_its_weight():
    partial = replace(AXES, metrics=("far", "kept"))
    assert partial.weights() == {"far": 0.5, "kept": 0.5}
    plain = replace(AXES, axes=())
    assert plain.weights() == dict.fromkeys(AXES.metrics, pytest.approx(1 / 3))
    parts = plain.contributions({"near": 0.0, "far": 0.0, "kept": 0.0}, RETRAINED)
    assert sum(parts.values()) == pytest.approx(12 / 3)


def test_who_forgets_beyond_retrain_is_not_nearer_than_who_forgets_as_much_less():
    def far_by(step):
        row = {"near": -4.0 + step, "far": -6.0 + step, "kept": 2.0}
        return AXES.distance(row, RETRAINED, trial=False)

    assert far_by(-3.0) == far_by(3.0) > far_by(-0.1) > far_by(0.0) == 0
