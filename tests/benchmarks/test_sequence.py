"""Requests in sequence: a suite that starts from what another one left."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stable_forgetting.benchmarks.pipeline.measuring import read_record, read_scores
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.bounded.attach import detach
from stable_forgetting.common.bounded.files import load_adapter
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.store.weights import WEIGHTS, load_weights
from stable_forgetting.vision.benchmark import VisionBenchmark

ROWS = {"original": None, "retrain": None, "gd_lora": None, "gd": None}
FIRST = {"kind": "class", "num_classes": None, "classes": [3]}
SECOND = {**FIRST, "classes": [5], "earlier_classes": [3]}


@pytest.fixture
def second(tiny_suite, tmp_path):
    """Writes the second suite; keywords replace its keys."""

    def write(**over):
        keys = {"suite": "second", "methods": ROWS, "defaults": {"steps": 3}, "after": "first.yaml"}
        return tiny_suite(tmp_path, protocol={"scenario": SECOND}, **{**keys, **over})

    return write


@pytest.fixture
def first(tiny_suite, tmp_path):
    """Writes the first suite with these rows."""

    def write(rows):
        own = {"suite": "first", "methods": rows, "defaults": {"steps": 3}}
        return tiny_suite(tmp_path, protocol={"scenario": FIRST}, **own)

    return write


@pytest.fixture
def sequence(first, second):
    first(ROWS)
    return second()


def stages_of(path, store):
    results = make_plan(load_suite(str(path)), store).results
    return {result.label: result.stage for result in results}


def test_every_row_goes_on_from_its_own_model(sequence, tmp_path):
    store = StageStore(tmp_path / "store")
    evaluated = stages_of(sequence, store)
    models = {label: stage.parents["model"] for label, stage in evaluated.items()}
    for label in ("gd_lora", "gd"):
        start = models[label].parents["start"]
        assert start.kind == "unlearn" and start.spec.method == label
        assert start.parents["start"].key == models["original"].key, "one Original for all"
        assert start.spec.protocol["scenario"]["classes"] == [3]
    assert models["retrain"].parents.keys() == {"split"}
    first = stages_of(sequence.with_name("first.yaml"), store)
    assert first["gd"].parents["model"].key == models["gd"].parents["start"].key


def test_a_sequence_runs_as_one_command(sequence, tmp_path, cli):
    root = tmp_path / "store"
    cli.ok("run", sequence, "--store", root, "--device", "cpu")
    store = StageStore(root)
    stage = stages_of(sequence, store)["gd_lora"]
    split = ForgetSplit.load(
        store.folder("split", stage.parents["split"].key) / "split.safetensors"
    )
    assert split.train_parts == ("forget", "retain", "earlier")
    record = read_record(store, stage)
    assert record.status == "ok"
    second = stage.parents["model"]
    first = second.parents["start"]
    runtime = Runtime(store=root, device="cpu")
    benchmark = VisionBenchmark(load_suite(str(sequence)).protocol, runtime)
    model = benchmark.blank()
    original = first.parents["start"]
    load_weights(model, store.folder("original", original.key) / WEIGHTS)
    for request in (first, second):  # one adapter on the other
        load_adapter(model, store.folder("unlearn", request.key))
        detach(model)
    found = benchmark.collect(model, split.parts["forget"])
    stored = read_scores(store, stage)["forget"]
    assert np.array_equal(found.loss, stored.loss)


def test_a_request_after_a_diverged_one_has_diverged(first, second, tmp_path, cli):
    rows = {"original": None, "retrain": None, "bad": {"method": "gd", "params": {"lr": 1e9}}}
    first(rows)
    path = second(methods=rows)
    cli.ok("run", path, "--store", tmp_path / "store")
    store = StageStore(tmp_path / "store")
    stage = stages_of(path, store)["bad"]
    record = read_record(store, stage)
    assert record.status == "diverged" and "earlier request diverged" in record.status_detail
    assert not record.metrics


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"after": "second.yaml"}, "names the suite itself"),
        ({"after": "third.yaml"}, "third.yaml"),
        ({"tune": {"seeds": [0], "trials": 1, "grids": {"default": {"lr": [0.1]}}}}, "is tuned"),
    ],
)
@pytest.mark.usefixtures("sequence")
def test_misconfigured_sequences_say_what_to_do(second, cli, one_line_error, over, message):
    assert message in one_line_error(cli("plan", second(**over)))


def test_requests_in_a_circle_are_refused(second, tmp_path, cli, one_line_error):
    for name, after in (("a", "b.yaml"), ("b", "c.yaml"), ("c", "b.yaml")):
        assert second(suite=name, after=after).name == f"{name}.yaml"
    for name in "abc":
        line = one_line_error(cli("plan", tmp_path / f"{name}.yaml"))
        assert "or a later one; name the request before it" in line


@pytest.mark.usefixtures("sequence")
def test_a_row_that_the_earlier_request_lacks_is_run_there_too(second, tmp_path):
    rows = {**ROWS, "mine": {"method": "gd_sine", "params": {"lr": 0.02}}}
    stage = stages_of(second(methods=rows), StageStore(tmp_path / "store"))["mine"]
    earlier = stage.parents["model"].parents["start"]
    assert earlier.spec.method == "gd_sine" and earlier.spec.params["lr"] == 0.02


def test_an_override_names_the_request_before_of_this_suite_alone(sequence):
    overrides = ["after=first.yaml", "defaults.steps=7"]
    before = load_suite(str(sequence), overrides).after
    assert before.name.startswith("first+") and before.after is None
    assert before.rows[-1].config.steps == 7


# Requests on text --------------------------------------------------------------------------------

REPORTED = ["su", "su_earlier", "du", "rd", "log10_fq", "mu"]


def text_suite(write, folder, request, **over):
    scenario = {"kind": "requests", "requests": [1, 2], "request": request, "used": 0.5}
    over = {"columns": REPORTED, **over}
    return write(folder, suite=f"text-{request}", protocol={"scenario": scenario}, **over)


def test_requests_on_text_report_what_was_used_unused_and_earlier(tmp_path, cli, tiny_text_suite):
    text_suite(tiny_text_suite, tmp_path, 1)
    path = text_suite(tiny_text_suite, tmp_path, 2, after="text-1.yaml")
    cli.ok("run", path, "--store", tmp_path / "store")
    store = StageStore(tmp_path / "store")
    stages = stages_of(path, store)
    model = stages["gd_sine"].parents["model"]
    assert model.parents["start"].spec.protocol["scenario"]["request"] == 1
    folder = store.folder("split", model.parents["split"].key)
    parts = ForgetSplit.load(folder / "split.safetensors").parts
    sizes = {part: len(parts[part]) for part in ("forget", "unused", "earlier")}
    assert sizes == {"forget": 4, "unused": 4, "earlier": 4}
    for label, stage in stages.items():
        scores = read_scores(store, stage)
        assert {part: len(scores[part].loss) for part in sizes} == sizes, label
        metrics = read_record(store, stage).metrics
        assert all(0 <= metrics[name] <= 100 for name in ("su", "su_earlier", "du", "rd"))
    first = stages_of(tmp_path / "text-1.yaml", store)["gd_sine"].parents["model"]
    assert first.key == model.parents["start"].key
    assert (
        "earlier"
        not in ForgetSplit.load(
            store.folder("split", first.parents["split"].key) / "split.safetensors"
        ).parts
    )
    board = json.loads(cli("report", path, "--store", store.root, "--format", "json").out)
    row = next(row for row in board["rows"] if row["row"] == "gd_sine")
    assert row["metrics"]["su_earlier"]["mean"] is not None
