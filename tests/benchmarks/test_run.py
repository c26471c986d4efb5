from __future__ import annotations

import hashlib
import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.pipeline import schedule
from stable_forgetting.benchmarks.pipeline.context import StageContext, require_learnt
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.runner import run_stage
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import GateError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.records import RunRecord, environment, processor
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.store.weights import load_weights
from stable_forgetting.common.train.tracking import read_scalars
from stable_forgetting.vision.benchmark import VisionBenchmark
from tests.benchmarks.test_render import strict

FAILING = """
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.base.registry import METHODS

@METHODS.register("boom", summary="fails")
class Boom(UnlearningMethod):
    "Fails, always, with an error that is its own."
    info = MethodInfo(1, "-", frozenset({"forget"}))
    class Config(UnlearningMethod.Config):
        lr: float = 0.1
    def unlearn(self, task):
        raise ZeroDivisionError("boom")
"""


def results_of(path, store, *overrides):
    """(label, seed, replicate) -> (record, model's folder, model's done.json)."""
    store = StageStore(store)
    found = {}
    for result in make_plan(load_suite(str(path), overrides), store).results:
        model = result.stage.parents["model"]
        record = RunRecord.load(store.folder("measure", result.stage.key) / "record.json")
        done = store.done(model.kind, model.key)
        key = (result.label, result.seed, result.replicate)
        found[key] = (record, store.folder(model.kind, model.key), done)
    return found


@pytest.fixture(scope="module")
def results(filled):
    """Those of the class suite."""
    return results_of(filled.paths["class"], filled.store)


def ids_digest(ids):
    return hashlib.sha256(np.sort(ids).astype("<i8").tobytes()).hexdigest()


def measured(record):
    return record.status, record.metrics, record.dynamics


@pytest.mark.parametrize("kind", ["class", "random"])
def test_end_to_end(filled, kind):
    done, path = filled.done[kind], filled.paths[kind]
    assert done.code == 0 and done.err == "", done.err
    for label in load_suite(str(path)).spec.methods:
        assert label in done.out
    for (label, _, _), (record, _, _) in results_of(path, filled.store).items():
        if label in ("gd_bad", "gd_capped"):
            continue
        assert record.status == "ok", label
        expected = {"fa", "ua", "ra", "ta", "va", "mia", "mia_auc", "forget_loss", "test_loss"}
        assert expected <= {name for name, value in record.metrics.items() if value is not None}
        assert record.metrics["fa"] + record.metrics["ua"] == pytest.approx(100)
        assert ("ta_f" in record.metrics) == (kind == "class")
        assert record.seed == 1 and not record.trial
        assert record.environment["packages"]["torch"] and record.created
        if record.method != "original":
            assert record.cost["seconds"] > 0 and record.cost["steps"] > 0
    board = make_leaderboard(load_suite(str(path)), StageStore(filled.store))
    assert board.complete and board.rows[0].label == "retrain"


def test_everything_written_is_strict_json(filled):
    files = [*filled.store.rglob("*.json"), *filled.store.rglob("*.jsonl")]
    names = {path.name for path in files}
    assert {"done.json", "record.json", "adapter.json", "scalars.jsonl", "records.jsonl"} <= names
    for path in files:
        text = path.read_text()
        for document in text.splitlines() if path.suffix == ".jsonl" else [text]:
            strict(document)


@pytest.mark.parametrize("kind", ["class", "random"])
def test_who_was_trained_on_what(filled, kind, find_stage):
    path, store = filled.paths[kind], StageStore(filled.store)
    stage = find_stage(path, filled.store, "split", "split/seed-1")
    split = ForgetSplit.load(store.folder("split", stage.key) / "split.safetensors")
    forget, retain = (set(split.parts[part].tolist()) for part in ("forget", "retain"))
    assert forget and retain and not forget & retain
    results = results_of(path, filled.store)
    _, _, original = results["original", 1, 0]
    assert original["trained_on"] == ids_digest(np.array(sorted(forget | retain)))
    for replicate in (0, 1):
        assert results["retrain", 1, replicate][2]["trained_on"] == ids_digest(
            np.array(sorted(retain))
        )
    assert {record.split["digest"] for record, _, _ in results.values()} == {split.digest}
    assert {record.data["digest"] for record, _, _ in results.values()} == {original["data"]}
    record = results["gd", 1, 0][0]
    scores = load_file(store.folder("score", record.stages["scores"]) / "scores.safetensors")
    for part, ids in split.parts.items():
        assert np.array_equal(np.sort(scores[f"{part}/indices"]), ids), part


def test_original_and_retrain_hold_one_model(tiny_suite, tmp_path, find_stage, monkeypatch):
    """The task's own is the one that is trained; a second one would take its memory twice."""
    path, build = tiny_suite(tmp_path), Mock(side_effect=VisionBenchmark.build)
    monkeypatch.setattr(VisionBenchmark, "build", lambda self, seed: build(self, seed))
    for kind in ("split", "original", "retrain"):
        stage = find_stage(path, tmp_path, kind, f"{kind}/seed-1")
        run_stage(stage, Runtime(store=tmp_path, device="cpu"))
    assert len({call.args[1] for call in build.call_args_list}) == build.call_count == 2


def test_records_say_the_device_and_how_float32_was_scored(tiny_suite, tmp_path, find_stage):
    stage = find_stage(tiny_suite(tmp_path), tmp_path, "split", "split/seed-1")

    def hardware(device):
        return StageContext(stage, Runtime(store=tmp_path, device=device)).hardware

    for device, rounded in (("cpu", None), ("cuda:0", "tf32")):
        assert hardware(device).get("scored_float32_as") == rounded
        assert hardware(device)["device"] == device
    assert hardware("auto")["device"] in ("cpu", "cuda:0"), "by the name of what was picked"


def test_a_processor_is_named_with_family_and_model(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t: fpu\n")
    assert processor(cpuinfo) == "AMD EPYC, family 25, model 17"
    assert processor(tmp_path / "none")
    assert environment()["processor"] == processor()


def test_two_retrains_differ_and_share_their_split(results):
    first, second = (results["retrain", 1, replicate] for replicate in (0, 1))
    assert first[0].stages["split"] == second[0].stages["split"]
    weights = [(folder / "model.safetensors").read_bytes() for _, folder, _ in (first, second)]
    assert weights[0] != weights[1]


def test_same_seed_same_bits_in_another_store(filled, results, cli, tmp_path):
    rows, store = ["finetune", "random_label", "gd_sine", "gd_ball"], tmp_path / "another"
    run = ("run", filled.paths["class"], "--store", store)
    cli.ok(*run, "--only", ",".join(rows))
    suite = load_suite(str(filled.paths["class"]), only=rows)
    there, checked = StageStore(store), 0
    for result in make_plan(suite, there).results:
        record = RunRecord.load(there.folder("measure", result.stage.key) / "record.json")
        ours, folder, _ = results[result.label, result.seed, result.replicate]
        assert measured(record) == measured(ours), result.label
        model = result.stage.parents["model"]
        for path in there.folder(model.kind, model.key).glob("*"):
            if path.suffix in (".safetensors", ".jsonl") or path.name == "adapter.json":
                assert path.read_bytes() == (folder / path.name).read_bytes(), path
                checked += 1
    assert checked >= 2 * 7


def test_a_second_run_executes_nothing(copied, cli, monkeypatch):
    def never(stage, *_args, **_kwargs):
        raise AssertionError(f"{stage.name} was run again")

    monkeypatch.setattr(schedule, "run_stage", never)
    before = {p: p.stat().st_mtime_ns for p in (copied.store / "stages").rglob("*")}
    done = cli(
        "run", copied.paths["class"], "--store", copied.store,
        "--threads", 2, "--device", "cpu",
    )  # fmt: skip
    assert done.code == 0 and "Traceback" not in done.err
    assert before == {p: p.stat().st_mtime_ns for p in (copied.store / "stages").rglob("*")}
    asked = cli("plan", copied.paths["class"], "--store", copied.store)
    counts = [line.split() for line in asked.out.splitlines() if "measure" in line]
    assert counts == [["measure", "12", "0", "12"]], "eleven rows and the second Retrain"


@pytest.mark.parametrize("label", ["gd_bad", "gd_capped"])
def test_divergence_is_a_status(filled, results, label):
    record, folder, done = results[label, 1, 0]
    assert record.status == done["status"] == "diverged"
    assert "diverged at step" in record.status_detail
    assert record.cost["steps"] == done["step"] >= 1
    assert record.metrics == {} and not (folder / "model.safetensors").exists()
    board = make_leaderboard(load_suite(str(filled.paths["class"])), StageStore(filled.store))
    row = next(row for row in board.rows if row.label == label)
    assert list(row.diverged) == [1] and row.derived == {} and row.ag_per_seed == {}
    assert label in [found.label for found in board.rows[-2:]], "ranked last"
    line = next(x for x in filled.done["class"].out.splitlines() if x.split()[:1] == [label])
    assert line.endswith("✗1 "), "one seed diverged"
    others = [row for row in board.rows if not row.label.startswith(("gd_bad", "gd_capped"))]
    assert all(row.derived["ag"].n == 1 for row in others)


def test_adapters_are_stored_small_and_evaluated_merged(filled, results):
    from stable_forgetting.common.bounded.files import load_adapter

    suite = load_suite(str(filled.paths["class"]))
    benchmark = BENCHMARKS["image_classification"](
        suite.protocol, Runtime(store=filled.store, device="cpu")
    )
    original = results["original", 1, 0][1] / "model.safetensors"
    for label in ("gd_lora", "gd_sine", "gd_ball"):
        record, folder, _ = results[label, 1, 0]
        assert not (folder / "model.safetensors").exists()
        assert (folder / "adapter.safetensors").stat().st_size < original.stat().st_size
        model = benchmark.blank()
        load_weights(model, original)
        load_adapter(model, folder)
        ids = benchmark.split(1).parts["forget"]
        scores = benchmark.collect(model, ids)
        assert scores.accuracy == record.metrics["fa"]
        assert scores.loss.mean() == pytest.approx(record.metrics["forget_loss"], rel=1e-5)
        assert record.cost["trainable_parameters"] < record.cost["base_parameters"]
    full = results["gd", 1, 0][0].cost
    assert full["trainable_parameters"] == full["base_parameters"]


def test_methods_move_the_model(results):
    loss = {label: record.metrics.get("forget_loss") for (label, _, r), (record, _, _)
            in results.items() if r == 0}  # fmt: skip
    for label in ("finetune", "ascent", "random_label", "gd", "gd_lora", "gd_sine", "gd_ball"):
        assert loss[label] != loss["original"], label
    assert loss["ascent"] > loss["original"]


def test_scalars_have_no_gap_and_no_duplicate(results):
    for (label, _, _), (record, folder, _) in results.items():
        if record.status == "ok":
            steps = [json.loads(line)["step"] for line in (folder / "scalars.jsonl").open()]
            if label in ("finetune", "ascent", "gd", "gd_lora", "gd_sine", "gd_ball"):
                assert steps == [1, 2, 4, 6], label
            read = read_scalars(folder / "scalars.jsonl")
            assert steps == sorted(set(steps)) and len(read) == len(steps)


def test_a_weak_original_ends_a_run_before_any_retrain_is_trained(
    tiny_suite, tmp_path, cli, one_line_error, nothing_half
):
    rows = {"original": None, "retrain": None, "gd": None}
    path = tiny_suite(tmp_path, suite="weak", methods=rows, defaults={"steps": 2})
    given = ("run", path, "--store", tmp_path / "store")
    gate = "protocol.minimum_train_accuracy=99.5"
    line = one_line_error(cli(*given, "--set", gate))
    assert "minimum_train_accuracy 99.5" in line and "original/seed-1" in line
    before = sorted(each.name for each in (tmp_path / "store/stages").iterdir())
    kinds = {name.partition("-")[0] for name in before}
    assert "original" in kinds and not {"retrain", "unlearn"} & kinds
    assert "original/seed-1" in one_line_error(cli(*given, "--set", gate))
    nothing_half(tmp_path / "store")
    assert before == sorted(each.name for each in (tmp_path / "store/stages").iterdir())
    assert cli(*given, "--only", "original", "--set", gate).code == 0, "nothing is unlearned"
    cli.ok(*given)
    with pytest.raises(GateError, match=r"reaches 98\.9 % .* below minimum_train_accuracy 99;"):
        require_learnt(Mock(), {"status": "ok", "train_accuracy": 98.98}, 99)


def test_a_failing_row_leaves_the_others_alone(copied, cli, tmp_path, tiny_suite, nothing_half):
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING)
    boom = {"without": ["steps"]}
    rows = {"original": None, "retrain": None, "boom": boom, "gd_lora": {"params": {"lr": 1e-3}}}
    path = tiny_suite(tmp_path, suite="failing", methods=rows, defaults={"steps": 3})
    args = ("run", path, "--store", copied.store, "--plugin", plugin)
    done = cli(*args)
    assert done.code == 1
    assert done.err.splitlines() == ["failed: boom/seed-1: ZeroDivisionError: boom"]
    table = [line.split()[0] for line in done.out.splitlines() if line.strip()]
    assert {"retrain", "gd_lora"} <= set(table) and "boom" not in table
    assert "Incomplete: 1 records are missing." in done.out
    (log,) = (copied.store / "failed").iterdir()
    text = log.read_text()
    assert text.startswith("boom/seed-1") and "ZeroDivisionError: boom" in text
    assert "Traceback" in text, "the log is where the traceback goes"
    nothing_half(copied.store)
    plugin.write_text(FAILING.replace('raise ZeroDivisionError("boom")', "return task.model"))
    mended = cli(*args)
    assert mended.code == 0 and mended.err == ""
    assert list((copied.store / "failed").iterdir()) == [], "a mended failure is forgotten"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return None", "returned NoneType, not a model"),
        ("import torch; return torch.nn.Linear(1, 1)", "other tensors than Original"),
        ("import sys; sys.exit(0)", "called sys.exit(0)"),
    ],
)
def test_what_a_method_returns_is_checked(copied, cli, tmp_path, tiny_suite, body, words):
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING.replace('raise ZeroDivisionError("boom")', body))
    path = tiny_suite(
        tmp_path, suite="odd", methods={"original": None, "retrain": None, "boom": None}
    )
    done = cli("run", path, "--store", copied.store, "--plugin", plugin)
    assert done.code == 1 and words in done.err and "Traceback" not in done.err
    assert not [folder for folder in (copied.store / "stages").glob("*") if folder.name[0] == "."]
    assert "Incomplete: 1 records are missing." in done.out


def test_tuning_end_to_end_survives_a_failing_row(copied, cli, tmp_path, tiny_suite):
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING)
    rows = {"original": None, "retrain": None, "boom": {"without": ["steps"]}, "gd": None}
    grids = {"default": {"lr": [1e-4, 1e6]}}
    path = tiny_suite(
        tmp_path,
        suite="tuned",
        methods=rows,
        defaults={"steps": 4},
        tune={"seeds": [0], "trials": 2, "grids": grids},
    )
    done = cli("run", path, "--store", copied.store, "--plugin", plugin)
    assert done.code == 1 and len(done.err.splitlines()) == 2, "both trials of one row failed"
    report = json.loads((copied.store / "suites/tuned/leaderboard.json").read_text())
    gd = next(row for row in report["rows"] if "gd" in row.values())
    assert gd["chosen"] == {"lr": 1e-4} and gd["trials"] == 2, "the trial at 1e6 diverged"
    assert gd["seeds"] == [1] and gd["derived"]["ag"]["n"] == 1
    trials = [
        RunRecord.load(path)
        for path in (copied.store / "stages").glob("measure-*/record.json")
        if RunRecord.load(path).trial
    ]
    assert sorted(record.method for record in trials) == ["gd", "gd", "retrain"]
    for record in trials:
        assert record.seed == 0
        assert not set(record.metrics) & {"ta", "ta_f", "mia", "test_loss", "mia_auc"}
        assert record.status == "diverged" or record.metrics["va"] is not None
    assert len(list((copied.store / "tensorboard/tuned/seeds").glob("gd/seed-0/trial-*"))) == 2
    for record in trials:
        if record.status == "ok":
            folder = StageStore(copied.store).folder("score", record.stages["scores"])
            columns = load_file(folder / "scores.safetensors")
            assert {"forget/loss", "retain/loss", "validation/loss"} <= columns.keys()
            assert not any(key.startswith("test") or key.endswith("/probs") for key in columns)


def image_folder(root, seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (60, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = root / "shapes" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    return root


def shapes_suite(tmp_path, tiny_suite):
    return tiny_suite(
        tmp_path,
        suite="shapes",
        methods={"original": None, "retrain": None, "gd": None},
        defaults={"steps": 2},
        protocol={
            "data": {
                "name": "folder", "folder": "shapes", "native_size": 8, "image_size": 8,
                "train_images": 30, "validation_images": 9, "test_images": 15,
            },
            "model": {"image_size": 8, "patch_size": 4},
            "train": {"epochs": 1},
        },
    )  # fmt: skip


def test_a_finished_table_says_that_its_images_changed(tmp_path, cli, tiny_suite, caplog):
    path, root = shapes_suite(tmp_path, tiny_suite), image_folder(tmp_path / "data", 0)
    args = ("run", path, "--store", tmp_path / "store", "--data-root", root)
    for _ in range(2):
        assert cli(*args).code == 0 and "changed since its first run" not in caplog.text
    shutil.copy(root / "shapes/class0/0.png", root / "shapes/class0/again.png")
    assert cli(*args).code == 0 and "changed since its first run" in caplog.text


def test_changed_data_is_one_clear_error(tmp_path, cli, tiny_suite, one_line_error, nothing_half):
    path = shapes_suite(tmp_path, tiny_suite)
    store = tmp_path / "store"
    old, new = (image_folder(tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    args = ("run", path, "--store", store, "--data-root")
    one_line_error(cli(*args, tmp_path / "old" / "shapes"))
    assert not (store / "suites").exists()  # a refused run remembers nothing
    first = cli(*args, old, "--only", "original")
    assert list((store / "suites").glob("*/suite.yaml"))
    assert first.code == 0, first.err
    # a new row under the old seed meets the old split
    line = one_line_error(cli(*args, new))
    assert "the data changed" in line and "another --store" in line
    nothing_half(store)
    # a split that is made again does not hide that Original saw other data
    (split,) = (store / "stages").glob("split-*")
    shutil.rmtree(split)
    line = one_line_error(cli(*args, new))
    assert "original/seed-1 was trained on" in line
    shutil.rmtree(next((store / "stages").glob("split-*")))
    # a new seed is whole in itself, but does not belong into one table with the old one
    cli.ok(*args, old)
    line = one_line_error(cli(*args, new, "--seeds", "1,2"))
    assert "the data changed between runs" in line
    nothing_half(store)
