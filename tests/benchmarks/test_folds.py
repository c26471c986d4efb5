"""Scalability and sustainability: several forget sets of one suite, as tables and curves."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from stable_forgetting.benchmarks.leaderboard import judge as judging
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.report import noise_line
from stable_forgetting.benchmarks.pipeline.measuring import SPLIT_FILE, read_record
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import AccessError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.splits import ForgetSplit, ids_digest
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.store.weights import WEIGHTS, load_weights
from stable_forgetting.language.benchmarks.tofu import TofuBenchmark
from stable_forgetting.language.models.composite import LogitDifference

ROWS = {
    "original": None,
    "retrain": None,
    "gd": None,
    "whp": {"params": {"epochs": 1, "lr": 1e-2}},
}
NESTED = [{"scenario": {"kind": "authors", "forget_authors": count}} for count in (1, 2)]
IN_TURN = [
    {"scenario": {"kind": "requests", "requests": [1, 1], "request": request}} for request in (1, 2)
]
FOLDS = {
    "scalability": {"kind": "scalability", "protocols": NESTED},
    "sustainability": {"kind": "sustainability", "protocols": IN_TURN},
}
COLUMNS = ["forget_prob", "retain_prob"]


def write(tiny_text_suite, folder, kind, **over):
    return tiny_text_suite(
        folder, **{"suite": kind, "methods": ROWS, "columns": COLUMNS, "folds": FOLDS[kind], **over}
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tiny_text_suite, cli):
    """kind -> (suite file, store), each run once; both share a store."""
    folder = tmp_path_factory.mktemp("folds")
    store = folder / "store"
    paths = {kind: write(tiny_text_suite, folder, kind) for kind in FOLDS}
    for path in paths.values():
        cli.ok("run", path, "--store", store, "--device", "cpu")
    return paths, StageStore(store)


def models(path, store):
    """(label, fold) -> stage of the model."""
    plan = make_plan(load_suite(str(path)), store)
    return {
        (result.label, number): result.stage.parents["model"]
        for number, part in enumerate([*plan.folds, plan], 1)
        for result in part.results
    }


def test_scalability_starts_every_fold_from_one_original(ran):
    paths, store = ran
    made = models(paths["scalability"], store)
    original = made["original", 1]
    assert made["original", 2].key == original.key
    assert made["gd", 1].start.key == made["gd", 2].start.key == original.key
    assert made["gd", 1].key != made["gd", 2].key


def test_the_last_fold_decides_what_weighs_in_all(ran, monkeypatch):
    paths, store = ran
    suite = load_suite(str(paths["scalability"]))
    asked = []

    def noisy(judge):
        asked.append(judge.suite.protocol)
        return {"forget_log_ratio": (2.0, 1.0)}

    monkeypatch.setattr(judging, "noisy_columns", noisy)
    board = make_leaderboard(suite, store)
    assert asked == [suite.protocol], "no fold before it is asked"
    assert "forget_log_ratio" not in board.rule.metrics
    assert [fold.rule for fold in board.folds] == [board.rule]
    assert "The last fold decides for all folds." in noise_line(board)


def test_sustainability_goes_on_from_the_fold_before(ran):
    paths, store = ran
    made = models(paths["sustainability"], store)
    assert made["gd", 2].start.key == made["gd", 1].key
    assert made["gd", 1].start.key == made["original", 1].key
    folder = store.folder("split", made["gd", 2].parents["split"].key)
    parts = ForgetSplit.load(folder / SPLIT_FILE).parts
    first = store.folder("split", made["gd", 1].parents["split"].key)
    assert np.array_equal(parts["earlier"], ForgetSplit.load(first / SPLIT_FILE).parts["forget"])


def test_names_tell_the_fold(ran):
    paths, store = ran
    plan = make_plan(load_suite(str(paths["scalability"])), store)
    names = {stage.name for stage in plan.stages() if stage.kind == "unlearn"}
    assert names == {f"fold-{k}/{label}/seed-1" for k in (1, 2) for label in ("gd", "whp")}


MUSE = """
suite: fold-of-muse
extends: muse-invented
protocol:
  data: {folds: 2, passage_length: 200, teach: 0, qa_pairs: 2, max_length: 256}
  model: {dim: 16, depth: 1, context: 256, tokenizer: 300}
  train: {epochs: null, steps: 2, warmup_steps: 0}
  minimum_train_accuracy: 0
  scenario: {kind: sust, fold: 1}
seeds: [1]
retrains: 1
rows: [original, retrain, finetune]
"""


def test_retrain_is_trained_on_the_folds_to_come_and_no_method_is(cli, tmp_path):
    path = tmp_path / "fold-of-muse.yaml"
    path.write_text(MUSE, encoding="utf-8")
    cli.ok("run", path, "--store", tmp_path / "store")
    store = StageStore(tmp_path / "store")
    plan = make_plan(load_suite(str(path)), store)
    stages = {stage.kind: stage for stage in plan.stages()}
    split = ForgetSplit.load(store.folder("split", stages["split"].key) / SPLIT_FILE)
    assert len(split.parts["later"]) == len(split.parts["forget"]) == 3
    kept = np.union1d(split.parts["retain"], split.parts["later"])
    facts = store.done("retrain", stages["retrain"].key)
    assert facts["trained_on"] == ids_digest(kept)
    assert store.done("original", stages["original"].key)["trained_on"] == ids_digest(split.train)
    access = DataAccess(None, split, METHODS["finetune"].info.access, "finetune")
    with pytest.raises(AccessError, match="later"):
        access.split.parts["later"]


@pytest.mark.parametrize("kind", FOLDS)
def test_the_report_has_curves_and_a_table_per_metric(ran, cli, kind):
    paths, store = ran
    folder = store.root / "suites" / kind
    data = json.loads((folder / "leaderboard.json").read_text())["folds"]
    assert data["kind"] == kind
    assert data["forgotten"] == ([4, 8] if kind == "scalability" else [4, 4])
    plan = make_plan(load_suite(str(paths[kind])), store)
    for number, part in enumerate([*plan.folds, plan]):
        for result in part.results:
            record = read_record(store, result.stage)
            for name in COLUMNS:
                line = data["rows"][result.label][name]
                assert line[number] == pytest.approx(record.metrics[name]), (result.label, name)
    text = (folder / "LEADERBOARD.md").read_text()
    assert f"## {kind.capitalize()}" in text and "(folds.svg)" in text
    picture = ElementTree.fromstring((folder / "folds.svg").read_text())
    panels = [element for element in picture.iter() if element.get("stroke") == "#ccc"]
    lines = [element for element in picture.iter() if element.tag.endswith("polyline")]
    assert len(panels) == len(COLUMNS) + 1, "and the distance"
    curves = [
        any(v is not None for v in line) for r in data["rows"].values() for line in r.values()
    ]
    assert len(lines) == len(curves)
    page = (folder / "leaderboard.html").read_text()
    assert "by fold" in page and page.count("<svg") == 3, "distance, target, folds"
    shown = cli("report", paths[kind], "--store", store.root)
    assert shown.code == 0 and "by fold" in shown.out


def test_two_models_answer_in_scalability_and_are_out_in_sustainability(ran):
    paths, store = ran
    made = models(paths["scalability"], store)
    folder = store.root / "suites"
    text = (folder / "scalability" / "LEADERBOARD.md").read_text()
    assert "whp: a generation-time method, 2 models at inference" in text
    for number in (1, 2):
        assert made["whp", number].start.key == made["original", 1].key
    later = models(paths["sustainability"], store)
    assert ("whp", 1) in later and ("whp", 2) not in later
    text = (folder / "sustainability" / "LEADERBOARD.md").read_text()
    assert (
        "whp: not applicable (2 models at inference, of which no later request can start)" in text
    )


def test_both_models_are_stored_and_answer_as_one(ran):
    paths, store = ran
    resolved = load_suite(str(paths["scalability"]))
    stage = make_plan(resolved, store).results[-1].stage
    model = stage.parents["model"]
    assert model.spec.method == "whp"
    benchmark = TofuBenchmark(resolved.protocol, Runtime(store=store.root, device="cpu"))
    joined = LogitDifference(benchmark.blank(), benchmark.blank(), 1.0)
    load_weights(joined, store.folder("unlearn", model.key) / WEIGHTS)
    baseline = benchmark.blank()
    load_weights(baseline, store.folder("original", model.start.key) / WEIGHTS)
    kept = joined.baseline.state_dict()
    assert all((kept[name] == value).all() for name, value in baseline.state_dict().items())
    split = ForgetSplit.load(store.folder("split", model.parents["split"].key) / SPLIT_FILE)
    parts = benchmark.parts(split, trial=False, seed=1)
    metrics = benchmark.evaluate(benchmark.score(joined.eval(), parts), trial=False, seed=1)
    assert metrics["forget_prob"] == read_record(store, stage).metrics["forget_prob"]


@pytest.mark.parametrize(
    ("kind", "protocols", "words"),
    [
        ("scalability", IN_TURN, "fold 2 must hold fold 1"),
        ("sustainability", NESTED, "fold 2 must share nothing with folds up to 1"),
    ],
)
def test_sets_must_be_what_the_suite_says(tmp_path, tiny_text_suite, cli, kind, protocols, words):
    folds = {"kind": kind, "protocols": protocols}
    rows = {"original": None, "retrain": None, "gd": None}
    path = write(tiny_text_suite, tmp_path, kind, folds=folds, methods=rows)
    done = cli("run", path, "--store", tmp_path / "store")
    assert done.code == 2 and words in done.err and len(done.err.splitlines()) == 1


def test_folds_of_images_are_planned_the_same_way(tmp_path, tiny_suite, cli):
    classes = [{"scenario": {"kind": "class", "num_classes": None, "classes": [3]}}]
    second = {**classes[0]["scenario"], "classes": [5], "earlier_classes": [3]}
    folds = {"kind": "sustainability", "protocols": [*classes, {"scenario": second}]}
    path = tiny_suite(
        tmp_path, suite="images", folds=folds, methods={**ROWS, "whp": {"method": "ascent"}}
    )
    store = StageStore(tmp_path / "store")
    made = models(path, store)
    assert made["gd", 2].start.key == made["gd", 1].key
    cli.ok("plan", path, "--store", store.root)
