from __future__ import annotations

import dataclasses
import hashlib
import math

import pytest

from stable_forgetting.benchmarks.pipeline import stage as stage_module
from stable_forgetting.benchmarks.pipeline.measuring import references, trial_gap
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Stage
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.methods.simple import GradientDifference
from stable_forgetting.common.protocol.benchmark import Versions
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.vision.metrics import GAP

KINDS = {"split", "original", "retrain", "unlearn", "score", "measure"}
ROWS = {"original": None, "retrain": None, "gd": None, "gd_sine": None}
TUNED = {**ROWS, "fixed": {"method": "gd", "tune": False}}
TUNE = {"seeds": [0], "trials": 2, "grids": {"default": {"lr": [0.001, 0.002]}}}


@pytest.fixture
def store(tmp_path):
    return StageStore(tmp_path / "store")


@pytest.fixture
def plan_of(tiny_suite, store):
    def build(*overrides, **over):
        path = tiny_suite(**{"methods": ROWS, "seeds": [1, 2], "retrains": 2, **over})
        return make_plan(load_suite(str(path), overrides), store)

    return build


def keys_of(plan):
    """(kind, name) -> key."""
    return {(stage.kind, stage.name): stage.key for stage in plan.stages()}


def changed_kinds(before, after):
    old, new = keys_of(before), keys_of(after)
    assert old.keys() == new.keys()
    return {kind for (kind, name), key in old.items() if new[kind, name] != key}


def test_key_format_is_pinned(monkeypatch):
    monkeypatch.setattr(stage_module, "ENGINE_VERSION", 1)
    parent = Stage("split", {}, {"seed": 1, "config": {"fraction": 0.1}}, {}, "p")
    child = Stage("original", {"ignored": 1}, {"lr": 1e-3, "on": True}, {"split": parent}, "c")
    text = (
        '{"engine":1,"identity":{"config":{"fraction":0.1},"seed":1},"kind":"split","parents":{}}'
    )
    assert parent.key == hashlib.sha256(text.encode()).hexdigest()
    text = (
        '{"engine":1,"identity":{"lr":0.001,"on":true},"kind":"original","parents":{"split":"'
        + parent.key
        + '"}}'
    )
    assert child.key == hashlib.sha256(text.encode()).hexdigest()
    renamed = dataclasses.replace(child, name="other", spec={})
    assert renamed.key == child.key, "names and specs are not hashed"
    monkeypatch.setattr(stage_module, "ENGINE_VERSION", 2)
    assert dataclasses.replace(child, name="again").key != renamed.key


def test_shared_stages_appear_once_and_after_their_parents(plan_of):
    stages = list(plan_of().stages())
    assert len({stage.key for stage in stages}) == len(stages)
    count = {kind: sum(stage.kind == kind for stage in stages) for kind in KINDS}
    assert count == {
        "split": 2,
        "original": 2,
        "retrain": 4,
        "unlearn": 4,
        "score": 10,
        "measure": 10,
    }
    position = {stage.key: place for place, stage in enumerate(stages)}
    for stage in stages:
        assert all(position[p.key] < position[stage.key] for p in stage.parents.values())


def test_rows_with_one_config_share_their_stage(plan_of):
    plan = plan_of(methods={**ROWS, "same": {"method": "gd"}})
    by_label = {
        label: [r.stage.key for r in plan.results if r.label == label] for label in ("gd", "same")
    }
    assert by_label["gd"] == by_label["same"]
    assert sum(stage.kind == "unlearn" for stage in plan.stages()) == 4


def test_original_is_shared_by_class_and_random_suites(plan_of):
    one = keys_of(plan_of())
    two = keys_of(plan_of(protocol={"scenario": {"kind": "random", "fraction": 0.3}}))
    for (kind, name), key in one.items():
        other = two[kind, name]
        assert (key == other) == (kind == "original"), (kind, name)


@pytest.mark.parametrize(
    ("override", "kinds"),
    [
        ("protocol.data.train_images=150", KINDS),
        ("protocol.data.subset_seed=1", KINDS),
        ("protocol.data.noise=0.5", KINDS),
        ("protocol.model.dim=32", KINDS - {"split"}),
        ("protocol.train.epochs=3", KINDS - {"split"}),
        ("protocol.train.weight_decay=0.1", KINDS - {"split"}),
        ("protocol.train.mixed_precision=bf16", KINDS - {"split"}),
        ("protocol.scenario.classes=[5]", KINDS - {"original"}),
        ("protocol.scenario.num_classes=2", KINDS - {"original"}),
        ("protocol.evaluation.retain_samples=50", {"score", "measure"}),
        ("protocol.evaluation.features=[confidence]", {"measure"}),
        ("defaults.steps=5", {"unlearn", "score", "measure"}),
        ("methods.gd_sine.params.adapter.omega=50", {"unlearn", "score", "measure"}),
        ("version=2", set()),
        ("title=Other", set()),
        ("notes=Other", set()),
        ("columns=[ta]", set()),
        ("compare=[[gd, gd_sine]]", set()),
        ("protocol.minimum_train_accuracy=50", set()),
        ("methods.gd.params.lr=1e-4", set()),
        ("published=[tab:vit_cifar100/left]", set()),
    ],
)
def test_keys_change_with_what_changes_numbers_only(plan_of, override, kinds):
    before = plan_of(protocol={"scenario": {"kind": "class"}})
    assert changed_kinds(before, plan_of(override)) == kinds


def test_one_rows_params_leave_the_others_alone(plan_of):
    before, after = keys_of(plan_of()), keys_of(plan_of("methods.gd.params.lr=0.5"))
    changed = {name for (_, name), key in before.items() if after[_, name] != key}
    assert changed == {"gd/seed-1", "gd/seed-2"}


def test_keys_change_with_versions(plan_of, monkeypatch):
    before = plan_of()
    newer = dataclasses.replace(GradientDifference.info, version=99)
    with monkeypatch.context() as patch:
        patch.setattr(GradientDifference, "info", newer)
        after = plan_of()
    old, new = keys_of(before), keys_of(after)
    assert {name for kind, name in old if old[kind, name] != new[kind, name]} == {
        "gd/seed-1",
        "gd/seed-2",
    }, "a subclass has a version of its own"
    monkeypatch.setattr(
        BENCHMARKS["image_classification"], "versions", Versions(split=99, train=99)
    )
    assert changed_kinds(before, plan_of()) == KINDS


def test_seeds_and_replicates_are_independent_of_their_neighbours(plan_of):
    two, three = keys_of(plan_of()), keys_of(plan_of(seeds=[3, 2, 1], retrains=3))
    assert two.items() <= three.items()
    assert len(set(two.values())) == len(two)


# Tuning ------------------------------------------------------------------------------------------


def trial_metrics(fa, ra=90.0, va=80.0, mia=50.0):
    return {"fa": fa, "ua": 100 - fa, "ra": ra, "va": va, "mia_validation": mia}


def fill_trials(plan, store, put_record, gaps):
    """``gaps``: row -> trial -> gap of FA to Retrain (None: diverged)."""
    for result in plan.results:
        if result.trial is None:
            continue
        if result.trial < 0:
            put_record(store, result.stage, trial_metrics(0.0))
        elif result.label in gaps:
            gap = gaps[result.label][result.trial]
            put_record(store, result.stage, None if gap is None else trial_metrics(gap))


def test_tuned_rows_wait_for_all_their_trials(plan_of, store, put_record):
    plan = plan_of(methods=TUNED, tune=TUNE)
    assert plan.waiting == ["gd", "gd_sine"] and not plan.chosen
    finals = {(r.label, r.seed) for r in plan.results if r.trial is None}
    assert finals == {(label, s) for label in ("original", "retrain", "fixed") for s in (1, 2)}
    assert [r.trial for r in plan.results if r.label == "gd"] == [0, 1]
    assert sum(r.trial == -1 for r in plan.results) == 1, "one Retrain of the tuning seed"
    fill_trials(plan, store, put_record, {"gd": [4.0, 2.0]})
    plan = plan_of(methods=TUNED, tune=TUNE)
    assert plan.waiting == ["gd_sine"] and plan.chosen == {"gd": 1}
    final = next(r.stage for r in plan.results if r.label == "gd" and r.trial is None)
    assert final.spec.params["lr"] == 0.002 and final.spec.seed == 1


def test_a_trials_evaluation_is_never_taken_for_a_result(plan_of):
    tuned = plan_of(methods=TUNED, tune=TUNE)
    trial = next(r.stage for r in tuned.results if r.trial == -1)
    final = next(
        r.stage
        for r in plan_of(seeds=[0]).results
        if (r.label, r.replicate, r.trial) == ("retrain", 0, None)
    )
    assert trial.parents["model"].key == final.parents["model"].key
    assert trial.key != final.key


def test_tuning_sums_over_its_seeds(plan_of, store, put_record):
    tune = {**TUNE, "seeds": [0, 9]}
    plan = plan_of(methods=TUNED, tune=tune)
    for result in plan.results:
        if result.trial is not None and result.label in ("gd", "retrain"):
            worse = {(0, 0): 1.0, (0, 9): 9.0, (1, 0): 4.0, (1, 9): 4.0}
            fa = 0.0 if result.trial < 0 else worse[result.trial, result.seed]
            put_record(store, result.stage, trial_metrics(fa))
    assert plan_of(methods=TUNED, tune=tune).chosen == {"gd": 1}


def record(metrics, status="ok"):
    return RunRecord(
        status=status,
        benchmark="vision",
        benchmark_version=1,
        protocol={},
        method="gd",
        method_version=1,
        params={},
        seed=0,
        metrics=metrics,
    )


def test_trial_gap_reads_validation_only():
    retrain = record({**trial_metrics(0.0), "ta": 50.0, "mia": 10.0})
    target = references({"retrain": retrain})
    ours = record({**trial_metrics(4.0, ra=88, va=81, mia=45), "ta": 0.0, "mia": 99.0})
    assert trial_gap(ours, target, GAP) == pytest.approx((4 + 2 + 1 + 5) / 4)
    assert trial_gap(record({}, "diverged"), target, GAP) == math.inf
    assert trial_gap(record({"fa": 1.0}), target, GAP) == math.inf


def test_a_damaged_trial_record_is_found_and_set_aside(plan_of, store, put_record):
    plan = plan_of(methods=TUNED, tune=TUNE)
    fill_trials(plan, store, put_record, {"gd": [1.0, 2.0], "gd_sine": [1.0, 2.0]})
    stage = next(r.stage for r in plan.results if r.label == "gd")
    (store.folder("measure", stage.key) / "record.json").write_text('{"status": "ok"')
    with pytest.raises(DataError, match="made again by a run"):
        plan_of(methods=TUNED, tune=TUNE)
    again = plan_of(methods=TUNED, tune=TUNE)
    assert again.waiting and store.done("measure", stage.key) is None
