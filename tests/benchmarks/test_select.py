"""``tune.select: without_retrain``, and trials by the number of searched parameters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stable_forgetting.benchmarks.pipeline.measuring import read_record, read_scores, read_split
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.remembered import suite_digest
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.data.splits import ForgetSplit, unseen_split
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.language.benchmarks.tofu import TofuBenchmark
from stable_forgetting.vision.benchmark import VisionBenchmark

NOWHERE = Path("nowhere")
WITHOUT = "tune.select=without_retrain"
ROWS = {"original": None, "retrain": None, "gd": None}
TUNE = {"trials": 2, "grids": {"default": {"lr": [1e-3, 2e-3]}}}
MUSE = """
suite: two-sets
extends: muse-invented
protocol:
  data: {sets: 2, passages: 2, passage_length: 200, teach: 0, qa_pairs: 2, max_length: 256}
  model: {dim: 16, depth: 1, context: 256, tokenizer: 300}
  train: {epochs: null, steps: 2, warmup_steps: 0}
  minimum_train_accuracy: 0
seeds: [1]
retrains: 1
probes: {ceiling: null}
defaults: {steps: 2}
rows: [original, retrain, gd]
tune: {trials: 2, grids: {default: {lr: [1e-3, 2e-3]}}}
"""


def images(forgotten, mia):
    return {"fa": forgotten, "ua": 100 - forgotten, "ra": 99.0, "va": 70.0, "mia_validation": mia}


def vision(kind):
    protocol = {"scenario": {"kind": kind}, "train": {"steps": 1}}
    return validate(VisionBenchmark.Config, protocol, "test")


def one_line(text):
    return " ".join(text.split())


def answers(ratio, odds):
    forget = {"forget_log_ratio": ratio, "forget_odds_top": odds, "forget_odds_rest": odds}
    return {**forget, "retain_odds": 2.0}


def chunks(forgotten):
    return {"forget_accuracy": forgotten, "retain_accuracy": 99.0}


CASES = {
    # Retrain is further from what it never saw than held-out images are
    "random": ({"kind": "random"}, images(90, 60), images(100, 0), images(88, 58), images(71, 58)),
    # a Retrain of another random start, by whose attack the trial that names the class is nearer
    "class": ({"kind": "class"}, images(0, 40), images(100, 0), images(5, 40), images(0, 70)),
    "tofu": (None, answers(-0.9, -1.0), answers(-1.6, 3.0), answers(-0.8, -1.0), answers(0.0, -9)),
    "muse": (None, chunks(40.0), chunks(8.0), chunks(38.0), chunks(9.0)),
}
"""Arm -> its scenario; Retrain, what Original gives, two trials.

Of the trials the first one is nearer to Retrain, the second to the values without one.
"""


@pytest.fixture(params=CASES)
def case(request, tmp_path, tiny_suite, tiny_text_suite):
    """(path of a tuned suite, its hand-made values by who has them)."""
    scenario, retrain, original, *trials = CASES[request.param]
    if request.param == "muse":
        path = tmp_path / "two-sets.yaml"
        path.write_text(MUSE)
    elif request.param == "tofu":
        path = tiny_text_suite(tmp_path, methods=ROWS, tune=TUNE)
    else:
        path = tiny_suite(tmp_path, methods=ROWS, tune=TUNE, protocol={"scenario": scenario})
    return path, {"retrain": retrain, "original": original, 0: trials[0], 1: trials[1]}


def tuned(path, values, store, put_record, *overrides):
    """The plan once all trials are there."""
    suite = load_suite(str(path), overrides)
    for result in make_plan(suite, store).results:
        if result.trial is not None:
            metrics = values[result.label if result.trial < 0 else result.trial]
            put_record(store, result.stage, metrics)
    return make_plan(suite, store)


def test_another_trial_is_chosen_and_no_retrain_of_the_tuning_seed_is_planned(
    case, tmp_path, put_record
):
    path, values = case
    usual = tuned(path, values, StageStore(tmp_path / "usual"), put_record)
    other = tuned(path, values, StageStore(tmp_path / "other"), put_record, WITHOUT)
    assert (usual.chosen, other.chosen) == ({"gd": 0}, {"gd": 1})

    def only(plan, without):
        keys = {stage.key for stage in without.stages()}
        own = [s for s in plan.stages() if s.key not in keys and s.kind != "unlearn"]
        return sorted(f"{s.kind} {s.name}" for s in own if s.spec.seed == 0)

    model = ["measure original/seed-0/trial", "score original/seed-0/trial"]
    split = ["split privleak_holdout/seed-0"] if path.stem == "two-sets" else []
    assert only(usual, other) == [
        *("measure retrain/seed-0/trial", "retrain retrain/seed-0", "score retrain/seed-0/trial")
    ]
    assert only(other, usual) == model + split


def test_a_suite_without_the_option_keeps_its_digest_and_the_stages_of_its_trials(tiny_suite):
    path = str(tiny_suite(methods=ROWS, tune=TUNE))
    usual, named, other = (
        load_suite(path, given) for given in ((), ["tune.select=retrain"], [WITHOUT])
    )
    first = {"seeds", "trials", "grids", "spaces", "sampler", "round"}
    assert set(usual.spec.tune.model_dump()) == set(named.spec.tune.model_dump()) == first
    assert suite_digest(other) != suite_digest(usual)
    trials = [
        [r.stage.key for r in make_plan(suite, StageStore(NOWHERE)).results if r.label == "gd"]
        for suite in (usual, other)
    ]
    assert len(trials[0]) == 2 and trials[0] == trials[1]


def test_targets_are_values_of_original_or_numbers():
    rule = VisionBenchmark.without_retrain(vision("random"))
    original = References(original=images(100, 0), retrain=images(0, 0))
    row = {"fa": 60.0, "ra": 90.0, "va": 65.0}
    assert rule.distance(row, original, trial=True) == pytest.approx((10 + 9 + 5) / 3)
    assert rule.words == "fa to va of Original, ra to ra of Original, va to va of Original"
    by_class = VisionBenchmark.without_retrain(vision("class"))
    assert by_class.distance(row, original, trial=True) == pytest.approx((60 + 9 + 5) / 3)
    assert by_class.words.startswith("fa to 0, ")
    assert rule.distance(row, References(retrain=images(0, 0)), trial=True) is None
    assert rule.distance({"fa": 60.0}, original, trial=True) is None
    text = TofuBenchmark.without_retrain(TofuBenchmark.Config(train={"steps": 1}))
    row = {"forget_log_ratio": -0.5, "retain_odds": 1.8}
    assert text.distance(row, References(original=answers(-1, 3)), trial=True) == pytest.approx(
        (0.5 + 0.2) / 2
    )
    assert not text.targets.keys() - {*TofuBenchmark.gap.trial}


def test_a_part_takes_the_place_of_the_forget_set():
    parts = {name: np.array([k]) for k, name in enumerate(("forget", "retain", "held", "test"))}
    split = unseen_split(ForgetSplit("one", parts, "digest"), "held")
    assert {name: ids.tolist() for name, ids in split.parts.items()} == {
        "retain": [1], "test": [3], "forget": [2],
    }  # fmt: skip
    with pytest.raises(DataError, match=r"no part 'holdout'.*leave out tune\.select"):
        unseen_split(ForgetSplit("one", parts, "digest"), "holdout")


@pytest.mark.parametrize(
    ("over", "fault"),
    [
        ({"protocol": {"scenario": {"kind": "memorised"}}}, "names no data of this protocol that"),
        ({"protocol": {"data": {"validation_images": 0}}}, "names no data of this protocol that"),
        ({"tune": {"after_attack": "prune"}}, "after_attack compares with the tuning seed's Retra"),
    ],
)
def test_what_cannot_be_tuned_without_a_retrain_says_so(tiny_suite, over, fault):
    tune = {**TUNE, "select": "without_retrain", **over.pop("tune", {})}
    with pytest.raises(ConfigError, match=fault):
        load_suite(str(tiny_suite(methods=ROWS, tune=tune, **over)))


def test_a_row_that_stops_at_retrains_value_is_refused(tiny_suite, tmp_path):
    stopping = {"method": "gd", "params": {"evaluate_epochs": 1, "stop_below": {"fa": "retrain"}}}
    path = str(tiny_suite(methods={**ROWS, "gd": stopping}, tune=TUNE))
    assert make_plan(load_suite(path), StageStore(tmp_path)).waiting == ["gd"]
    with pytest.raises(ConfigError, match=r"row 'gd': stop_below reads Retrain's values.*give num"):
        make_plan(load_suite(path, [WITHOUT]), StageStore(tmp_path))


def test_one_set_of_news_has_no_text_for_tuning_alone(tmp_path):
    path = tmp_path / "two-sets.yaml"
    path.write_text(MUSE)
    with pytest.raises(ConfigError, match=r"tune\.select: benchmark 'muse' names no data of this"):
        load_suite(str(path), [WITHOUT, "protocol.data.sets=1"])


def test_goals_read_no_retrain_as_it_is():
    with pytest.raises(ConfigError, match=r"'tdec' are ordered by goals, for which no Retrain is"):
        load_suite("tdec-small", [WITHOUT])


def test_files_without_wrong_answers_give_no_target():
    def rule(rows):
        files = {"forget": "f", "retain": "r", "holdout": "h"}
        data = {"name": "jsonl", "files": files, "rows": rows}
        scenario = {"kind": "files"}
        return TofuBenchmark.without_retrain(
            TofuBenchmark.Config(train={"steps": 1}, data=data, scenario=scenario)
        )

    assert [rule(rows) is None for rows in ("text", "answers", "comparisons")] == [1, 1, 0]


def test_a_run_trains_no_retrain_of_the_tuning_seed_and_its_report_says_the_rule(
    cli, tiny_suite, tmp_path
):
    store = tmp_path / "store"
    path = tiny_suite(tmp_path, methods=ROWS, tune=TUNE, defaults={"steps": 2})
    done = cli.ok("run", path, "--store", store, "--set", WITHOUT)
    suite = load_suite(str(path), [WITHOUT])
    seeds = {
        s.spec.seed for s in make_plan(suite, StageStore(store)).stages() if s.kind == "retrain"
    }
    assert seeds == {1} and len([*(store / "stages").glob("retrain-*")]) == 1
    assert "by held-out forgetting and utility on seed 0, without a Retrain: fa to 0" in one_line(
        done.out
    )
    folder = store / "suites" / suite.name
    assert "without a Retrain (fa to 0, ra to ra of" in (folder / "LEADERBOARD.md").read_text()
    told = json.loads((folder / "leaderboard.json").read_text())["tuning"]
    assert told["select"] == "without_retrain" and len(told["sweep"]) == 2
    assert sum(trial["chosen"] for trial in told["sweep"]) == 1


def test_original_is_asked_about_held_out_text_of_the_tuning_seed(cli, tmp_path):
    path, store = tmp_path / "two-sets.yaml", tmp_path / "store"
    path.write_text(MUSE)
    done = cli.ok("run", path, "--store", store, "--set", WITHOUT)
    assert "Original with privleak_holdout in the place of forget" in one_line(done.out)
    stages = StageStore(store)
    plan = make_plan(load_suite(str(path), [WITHOUT]), stages)
    asked = next(r.stage for r in plan.results if r.trial == -1)
    own = next(r.stage for r in plan.results if r.trial == 0)
    held_out = read_split(stages, own.parents["split"]).parts["privleak_holdout"]
    assert read_split(stages, asked.parents["split"]).parts["forget"].tolist() == [*held_out]
    scores, record = read_scores(stages, asked), read_record(stages, asked)
    assert len(scores["forget"].loss) == len(held_out) == 2 and set(scores) == {"forget", "retain"}
    assert record.metrics["forget_accuracy"] == pytest.approx(scores["forget"].accuracy)


# Trials by the number of searched parameters ------------------------------------------------------

RATE = {"low": 1e-4, "high": 1e-2, "log": True}
SPACES = {
    "default": {"lr": RATE, "lam": {"low": 0.1, "high": 3, "log": True}},
    "finetune": {"lr": RATE},
}
FOUR = {**ROWS, "finetune": None, "gd_sine": None}


def test_a_row_with_more_searched_parameters_gets_more_trials(tiny_suite, cli, tmp_path):
    grids = {"gd_sine": {"lr": [1e-3, 2e-3, 3e-3], "lam": [0.1, 1.0]}}
    tune = {"trials_per_dimension": 3, "spaces": SPACES, "grids": grids}
    path = tiny_suite(tmp_path, methods=FOUR, tune=tune)
    suite = load_suite(str(path))
    drawn = {row.label: [d.values for d in row.draws] for row in suite.rows if row.search}
    assert {label: len(values) for label, values in drawn.items()} == {
        "gd": 6, "finetune": 3, "gd_sine": 6,
    }  # fmt: skip
    other = load_suite(str(tiny_suite(methods=FOUR, tune={"trials": 4, "spaces": SPACES})))
    for label in ("gd", "finetune"):
        first = [draw.values for draw in other.row(label).draws]
        assert drawn[label][:3] == first[:3], "the first draws do not depend on their number"
    plan = make_plan(suite, StageStore(tmp_path / "none"))
    assert plan.undrawn == 0 and sum((r.trial or 0) > 0 for r in plan.results) == 5 + 2 + 5
    assert "3 trials per searched parameter of a row" in one_line(cli("show", path).out)


def test_rounds_end_at_the_number_of_the_row(tiny_suite, tmp_path, put_record):
    tune = {"trials_per_dimension": 3, "round": 2, "sampler": "tpe", "spaces": SPACES}
    suite = load_suite(str(tiny_suite(methods=FOUR, tune=tune)))
    store = StageStore(tmp_path / "store")
    plan = make_plan(suite, store)
    assert plan.undrawn == (6 - 2) + (3 - 2) + (6 - 2)
    while plan.waiting:
        for result in plan.results:
            if result.trial is not None and store.done("measure", result.stage.key) is None:
                put_record(store, result.stage, images(0, 50))
        plan = make_plan(suite, store)
    assert {label: len(draws) for label, draws in plan.draws.items()} == {
        "gd": 6, "finetune": 3, "gd_sine": 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("over", "fault"),
    [
        ({"trials": 3, "trials_per_dimension": 3}, "give one of trials and trials_per_dimension"),
        ({}, "give one of trials and trials_per_dimension"),
        ({"trials_per_dimension": 0}, "trials_per_dimension"),
        (
            {"trials_per_dimension": 3, "grids": {"gd": {"lr": [1e-3, 2e-3]}}},
            "grid 'gd' has 2 combinations, but trials_per_dimension makes it 3",
        ),
    ],
)
def test_a_count_that_does_not_fit_is_one_line(tiny_suite, over, fault):
    with pytest.raises(ConfigError, match=fault):
        load_suite(str(tiny_suite(methods=FOUR, tune={"spaces": SPACES, **over})))


def test_an_inherited_number_of_trials_goes_with_null(tiny_suite):
    path = str(tiny_suite(methods=FOUR, tune={"trials": 3, "spaces": SPACES}))
    suite = load_suite(path, ["tune.trials=null", "tune.trials_per_dimension=2"])
    assert len(suite.row("gd").draws) == 4 and len(suite.row("finetune").draws) == 2
    assert "trials" not in suite.spec.tune.model_dump()
