from __future__ import annotations

import json
import math
import shutil
import threading
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.events import (
    export_events,
    export_samples,
    read_runs,
)
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.report.section import Answer, Sample
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.tracking import check_tracker


@pytest.fixture(scope="module")
def boards(filled):
    """Row and seed of the class suite -> (folder, EventAccumulator)."""
    return loaded(filled.store / "tensorboard" / "tiny-class" / "seeds")


@pytest.fixture(scope="module")
def summaries(filled):
    """Row of the class suite -> EventAccumulator."""
    return loaded(filled.store / "tensorboard" / "tiny-class" / "summary")


def loaded(root):
    found = {}
    for path in root.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0, "tensors": 0})
        name = str(path.parent.relative_to(root))
        assert name not in found, "one event file for each finished run"
        found[name] = events.Reload()
    return found


def scalars(events, name):
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_folders_are_named_by_row_and_seed(boards, filled):
    rows = set(load_suite(str(filled.paths["class"])).spec.methods) | {"retrain-2"}
    assert set(boards) == {f"{row}/seed-1" for row in rows}
    assert {path.name for path in (filled.store / "tensorboard").iterdir()} == {
        "tiny-class",
        "tiny-random",
    }


def test_reused_stages_are_shown_under_every_suite(filled):
    root = filled.store / "tensorboard" / "tiny-random" / "seeds"
    assert list((root / "original" / "seed-1").glob("events.*")), "trained for the class suite"


@pytest.mark.parametrize("row", ["gd_lora", "gd_sine", "gd_ball"])
def test_adapter_rows_have_their_curves(boards, row):
    events = boards[f"{row}/seed-1"]
    tags = set(events.Tags()["scalars"])
    wanted = {
        "loss/retain_loss",
        "loss/forget_loss",
        "lr",
        "grad_norm/A",
        "grad_norm/B",
        "adapter/delta_ratio",
        "adapter/bound_active",
        "logits/spread",
    }
    assert wanted <= tags
    for name in wanted:
        points = scalars(events, name)
        assert [step for step, _ in points] == [1, 2, 4, 6], name
        assert all(math.isfinite(value) for _, value in points), name
    ratios = dict(scalars(events, "adapter/delta_ratio"))
    assert ratios[6] > 0 and ("adapter/at_ball" in tags) == (row == "gd_ball")


def test_training_has_curves_too(boards):
    for row in ("original", "retrain", "retrain-2", "gd"):
        tags = set(boards[f"{row}/seed-1"].Tags()["scalars"])
        assert {"lr", "logits/spread", "grad_norm/mlp", "grad_norm/attention"} <= tags
        assert "adapter/delta_ratio" not in tags
        assert any(name.startswith("loss/") for name in tags)


def test_final_metrics_and_config_are_there(boards, filled):
    suite, store = load_suite(str(filled.paths["class"])), StageStore(filled.store)
    for result in make_plan(suite, store).results:
        record = RunRecord.load(store.folder("measure", result.stage.key) / "record.json")
        name = result.label + (f"-{result.replicate + 1}" if result.replicate else "")
        events = boards[f"{name}/seed-1"]
        for metric, value in record.metrics.items():
            if value is not None:
                ((step, shown),) = scalars(events, f"final/{metric}")
                assert step == 0 and shown == pytest.approx(value, rel=1e-5)
        (text,) = events.Tensors("config/text_summary")
        config = json.loads(text.tensor_proto.string_val[0].decode().strip("`\n"))
        assert config["row"] == result.label and config["seed"] == 1
        assert config["method"] == record.method
        assert {key: config[key] for key in record.params} == record.params


def test_the_distance_and_the_gaps_are_those_of_the_board(boards, summaries, filled):
    folder = filled.store / "suites/tiny-class/leaderboard.json"
    rows = {row["row"]: row for row in json.loads(folder.read_text())["rows"]}
    for name in ("gd", "gd_sine", "finetune", "original"):
        for events in (boards[f"{name}/seed-1"], summaries[name]):
            ((_, distance),) = scalars(events, "final/distance")
            assert distance == pytest.approx(rows[name]["derived"]["ag"]["mean"], rel=1e-5)
            for metric, summary in rows[name]["gaps"].items():
                ((_, value),) = scalars(events, f"gap/{metric}")
                assert value == pytest.approx(summary["mean"], rel=1e-5, abs=1e-5), metric


def test_a_summary_run_per_row_has_means_and_curves(boards, summaries):
    assert set(summaries) == {name.split("/")[0] for name in boards}
    for tag in ("loss/retain_loss", "adapter/delta_ratio", "final/fa"):
        assert scalars(summaries["gd_sine"], tag) == scalars(boards["gd_sine/seed-1"], tag)
    about = session(summaries["gd_sine"])
    assert about["seeds"] == 1 and "seed" not in about


def test_means_are_over_the_seeds_that_have_a_value():
    from stable_forgetting.benchmarks.leaderboard.events import _mean
    from stable_forgetting.common.train.tracking import Run

    curves = [
        [{"step": 1, "time": 5.0, "loss": 1.0, "lr": None}, {"step": 2, "time": 6.0, "loss": 0.5}],
        [{"step": 1, "time": 9.0, "loss": 3.0, "lr": 0.1}],
    ]
    runs = [
        Run({"row": "gd", "seed": seed}, {"final/fa": value}, rows)
        for seed, value, rows in zip((1, 2), (10.0, 20.0), curves, strict=True)
    ]
    mean = _mean("gd", [*runs, Run({"row": "gd", "seed": 3}, {}, curves[0])])
    assert mean.metrics == {"final/fa": 15.0} and mean.config == {"row": "gd", "seeds": 2}
    assert mean.curves == [{"step": 1, "time": 5.0, "loss": 5 / 3, "lr": None}]


def columns(events):
    content = events.summary_metadata["_hparams_/experiment"].plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    tags = [info.name.tag for info in experiment.metric_infos]
    by_name = sorted(experiment.hparam_infos, key=lambda info: info.name)  # as TensorBoard does
    return [info.display_name for info in by_name], tags


def test_columns_begin_with_what_tells_rows_apart_and_leave_constants_out(boards, summaries):
    names, tags = columns(boards["gd_sine/seed-1"])
    assert names[:4] == ["row", "seed", "lr", "forget_weight"] and "steps" in names[4:7]
    assert tags[0] == "final/distance" and tags[1].startswith("gap/")
    values = {name: [] for name in names}
    for events in boards.values():
        assert columns(events) == (names, tags), "TensorBoard takes the columns of any one run"
        for name, value in session(events).items():
            values[name].append(value)
    first = {"row", "seed", "lr", "forget_weight", "steps", "epochs"}
    assert all(len(set(values[name])) > 1 for name in set(names) - first)
    assert columns(summaries["gd"])[0][:2] == ["row", "seeds"]


def test_times_are_those_of_the_training(boards, filled):
    events = boards["gd_sine/seed-1"].Scalars("lr")
    times = [event.wall_time for event in events]
    stages = [json.loads(path.read_text()) for path in filled.store.rglob("done.json")]
    seconds = [
        stage["cost"]["seconds"]
        for stage in stages
        if (stage["kind"], stage["name"]) == ("unlearn", "gd_sine/seed-1")
    ]
    assert times == sorted(set(times)) and len(times) == 4
    lasted = [value * (1 - events[0].step / events[-1].step) for value in seconds]
    assert any(times[-1] - times[0] == pytest.approx(value, abs=2e-3) for value in lasted)


def session(events):
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    fields = data.session_start_info.hparams
    plain = {key: key.split()[-1] for key in fields}
    return {plain[key]: getattr(value, value.WhichOneof("kind")) for key, value in fields.items()}


def test_hparams_make_a_table(boards):
    sine = session(boards["gd_sine/seed-1"])
    assert sine["row"] == "gd_sine" and sine["seed"] == 1
    assert sine["adapter.phi"] == "sine" and sine["adapter.omega"] == 100
    assert sine["steps"] == 6 and sine["forget_weight"] == pytest.approx(0.1)
    names = {"_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"}
    for events in boards.values():
        assert set(events.PluginTagToContent("hparams")) == names
    assert session(boards["retrain-2/seed-1"])["method"] == "retrain"


def test_diverged_runs_show_where(boards):
    events = boards["gd_bad/seed-1"]
    assert "config/text_summary" in events.Tags()["tensors"]
    assert session(events)["lr"] == 1e6
    assert not [name for name in events.Tags()["scalars"] if name.startswith("final/")]


def test_processes_of_one_suite_write_one_after_the_other(filled, tmp_path):
    root = tmp_path / "store"
    shutil.copytree(filled.store, root)
    suite = load_suite(str(filled.paths["class"]))
    board = make_leaderboard(suite, StageStore(root))
    folder = root / "tensorboard" / "tiny-class"
    before = set(folder.rglob("events.*"))
    other = threading.Thread(target=export_events, args=(board, root))
    with StageStore(root).lease("tensorboard", suite.name):
        other.start()
        other.join(0.5)
        assert other.is_alive() and set(folder.rglob("events.*")) == before
    other.join()
    assert not before & set(folder.rglob("events.*"))


def test_trackers_get_config_curves_and_final_values(filled, monkeypatch):
    """A stand-in for wandb, as accelerate would call it."""
    from accelerate import PartialState
    from accelerate import tracking as accelerated

    from stable_forgetting.common.train.tracking import send_runs

    sent = {}

    class Recorder:
        def __init__(self, project, *, name):
            assert project == "tiny-class"
            self.rows, self.config = [], None
            sent[name] = self

        def start(self):
            assert PartialState._shared_state, "accelerate's trackers log through it"
            self.open = True

        def store_init_configuration(self, values):
            self.config = values

        def log(self, values, step):
            assert self.open and None not in values.values()
            self.rows.append((step, values))

        def finish(self):
            self.open = False

    monkeypatch.setitem(accelerated.LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    board = make_leaderboard(load_suite(str(filled.paths["class"])), StageStore(filled.store))
    runs = read_runs(board, StageStore(filled.store))
    send_runs("wandb", "tiny-class", runs)
    assert set(sent) == set(runs) and not any(run.open for run in sent.values())
    run = sent["gd_sine/seed-1"]
    assert run.config["method"] == "gd_sine" and run.config["adapter.omega"] == 100
    steps = [step for step, _ in run.rows]
    assert steps == [1, 2, 4, 6, 6], "the final values stand at the last step"
    assert run.rows[-1][1]["final/distance"] == pytest.approx(
        runs["gd_sine/seed-1"].metrics["final/distance"]
    )


@pytest.mark.parametrize(
    ("name", "words"), [("wandbb", "wandb"), ("trackio", "pip install trackio")]
)
def test_a_tracker_that_is_not_there_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        check_tracker(name)


def test_samples_are_images_and_texts_in_tensorboard(filled, tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    picture = BytesIO()
    Image.fromarray(pixels).save(picture, format="PNG")
    answers = {"original": Answer("cat", 0.9, 0.9), "gd": Answer("a|b", 0.5, 0.1)}
    samples = [
        Sample(7, "", "cat", answers, picture.getvalue()),
        Sample(8, "Who wrote it?", "Ann", answers),
    ]
    board = make_leaderboard(load_suite(str(filled.paths["class"])), StageStore(filled.store))
    export_samples(board, tmp_path, samples)
    export_samples(board, tmp_path, samples)  # in the place of what was there
    (events,) = loaded(tmp_path).values()
    assert events.Tags()["images"] == ["sample 7"]
    (image,) = events.Images("sample 7")
    shown = Image.open(BytesIO(image.encoded_image_string))
    assert np.array_equal(np.asarray(shown), pixels)
    (text,) = events.Tensors("sample 8/text_summary")
    card = text.tensor_proto.string_val[0].decode()
    assert (
        "Who wrote it?" in card and "True answer: Ann" in card and "| gd | a\\|b | 0.500 |" in card
    )
