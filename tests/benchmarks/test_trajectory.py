"""Metrics over the steps of unlearning, from the log to the picture."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from stable_forgetting.benchmarks.leaderboard import target, trajectory
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.trajectory import mean_line
from stable_forgetting.benchmarks.report import svg
from stable_forgetting.common.train.tracking import read_scalars

ROWS = {
    "original": None,
    "gold": {"method": "retrain"},
    "gd": {"params": {"evaluate_every": 2, "steps": 5}},
    "ball": {"method": "gd_ball", "params": {"steps": 5}},
}


def test_rows_that_evaluate_in_training_get_a_trajectory(caplog, tiny_suite, tmp_path, cli):
    path = tiny_suite(tmp_path, suite="watched", methods=ROWS, columns=["fa", "ra"])
    done = cli.ok("run", path, "--store", tmp_path / "store")
    folder = tmp_path / "store" / "suites" / "watched"
    found = json.loads((folder / "trajectory.json").read_text())
    assert list(found) == ["gd"] and list(found["gd"]["1"]) == ["2", "4", "5"]
    final = json.loads((folder / "leaderboard.json").read_text())
    gd = next(row for row in final["rows"] if row["row"] == "gd")
    for name in ("fa", "ra", "mia"):  # the last step is what is reported
        assert found["gd"]["1"]["5"][name] == pytest.approx(gd["metrics"][name]["mean"])
    picture = ElementTree.fromstring((folder / "trajectory.svg").read_text())
    lines = [element for element in picture.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 4, "Retrain and gd in two panels"

    # Retrain in the middle: a mark and bars for each other row, and a path where it was evaluated
    picture = ElementTree.fromstring((folder / "target.svg").read_text())
    tags = [element.tag.rpartition("}")[2] for element in picture.iter()]
    assert (tags.count("circle"), tags.count("polyline")) == (3, 1)
    shown = [e for e in picture.iter() if e.get("class") == "row"]
    (told,) = [e[0].text for e in shown if e[0].text.startswith("gd:")]
    assert told == (
        f"gd: forget {gd['gaps']['fa']['mean']:+.1f}, keep {gd['gaps']['ra']['mean']:+.1f} points"
    )

    # a log that was damaged is named and made again, before a curve comes from it
    logs = (tmp_path / "store" / "stages").glob("unlearn-*/scalars.jsonl")
    log = next(path for path in logs if b"evaluation" in path.read_bytes())
    whole = log.read_bytes()
    log.write_bytes(whole.replace(b"evaluation/fa", b"evaluation/fb"))
    done = cli("run", path, "--store", tmp_path / "store")
    assert done.code == 0 and "scalars.jsonl: is not what was written" in caplog.text
    assert log.read_bytes() == whole
    assert json.loads((folder / "trajectory.json").read_text()) == found


def test_a_retrain_that_diverged_has_no_scores_to_compare_a_curve_with(
    hand_made, tmp_path, monkeypatch
):
    targets = {}
    table = {
        "retrain": {1: None, 2: (80, 99, 88, 30)},
        "gd": dict.fromkeys((1, 2), (82, 97, 89, 9)),
    }
    suite, store = hand_made(tmp_path, table)
    read = lambda board, store, model, target: targets.setdefault(model.key, target)  # noqa: E731
    monkeypatch.setattr(trajectory, "_trajectory", read)
    trajectory.read_trajectories(make_leaderboard(suite, store), store)
    assert [target is None for target in targets.values()] == [True, False]


def test_numbers_of_points_share_labels_and_stay_clear_of_each_other():
    square = (0.0, 0.0, 300.0, 300.0)

    def told(points):
        labels = [label for label in svg.numbered(points, square) if label.startswith("<text")]
        places = [re.search(r'x="([^"]+)" y="([^"]+)".*>(.+)<', label).groups() for label in labels]
        return {words: (float(x), float(y)) for x, y, words in places}

    assert [*told([(100, 50), (150, 50), (103, 47)])] == ["1, 3", "2"]
    (label,) = told([(290, 150)] * 4 + [(292, 150)])
    assert label == "1-5"
    line = [(10 * place, 150) for place in range(1, 29)]
    boxes = [(x, y - 9, x + 7 * len(n), y) for n, (x, y) in told(line).items()]
    assert len(boxes) == 28 and all(x >= 0 and right <= 300 for x, _, right, _ in boxes)
    for a, b in itertools.combinations(boxes, 2):
        assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]


@pytest.mark.parametrize("reach", [0.5, 1.5, 30.0, 100.0])
def test_ticks_of_the_target_have_room(reach):
    ticks = sorted(target._ticks(reach))
    places = [target._at((tick, 0.0), (reach, 1.0))[0] for tick in (*ticks, 0.0)]
    gaps = [b - a for a, b in itertools.pairwise(sorted(places))]
    assert len(ticks) >= 2 and min(gaps) >= target.ROOM and max(ticks) <= reach


def test_a_report_without_a_split_is_incomplete(copied, cli):
    (split,) = [f for f in (copied.store / "stages").glob("split-*") if f.is_dir()][:1]
    reports = []
    for there in (True, False):
        if not there:
            (split / "done.json").unlink()
        for path in copied.paths.values():
            done = cli("report", path, "--store", copied.store, "--format", "json")
            reports.append(json.loads(done.out)["complete"])
    assert sorted(reports) == [False, True, True, True]


@pytest.fixture
def stopping(tiny_suite, tmp_path, cli):
    """Runs a row with a condition to stop at; row -> its record."""

    def run(**params):
        rows = {"original": None, "retrain": None, "gd": {"params": params}}
        path = tiny_suite(tmp_path, suite="stopped", methods=rows, columns=["fa"])
        cli.ok("run", path, "--store", tmp_path / "store")
        lines = (tmp_path / "store/suites/stopped/records.jsonl").read_text().splitlines()
        return {record["row"]: record for record in map(json.loads, lines)}

    return run


def test_a_record_says_what_stopped_its_training(stopping):
    records = stopping(evaluate_every=2, steps=5, stop_below={"fa": 101.0})
    assert "fa" in records["gd"]["stopped"] and records["gd"]["cost"]["steps"] == 2
    assert records["retrain"]["stopped"] == ""


@pytest.mark.parametrize(("metric", "steps"), [("ua", 2), ("fa", 4)])
def test_a_training_stops_at_retrains_value(metric, steps, stopping):
    """Of a class that Retrain never saw: UA is at most Retrain's at once, FA never below it."""
    records = stopping(lr=1e-9, evaluate_every=2, steps=4, stop_below={metric: "retrain"})
    limit = records["retrain"]["metrics"][metric]
    at_most = records["gd"]["metrics"][metric] <= limit
    assert (records["gd"]["cost"]["steps"] == 2) == at_most
    assert records["gd"]["cost"]["steps"] == steps


def test_watching_does_not_move_the_result(tiny_suite, tmp_path, cli):
    values = []
    for every in (0, 2):
        row = {"method": "gd_lora", "params": {"evaluate_every": every, "steps": 4}}
        path = tiny_suite(tmp_path, suite=f"s{every}", methods={**ROWS, "gd": row})
        cli.ok("run", path, "--store", tmp_path / "store")
        text = (tmp_path / "store" / "suites" / f"s{every}" / "leaderboard.json").read_text()
        gd = next(row for row in json.loads(text)["rows"] if row["row"] == "gd")
        values.append({name: entry["mean"] for name, entry in gd["metrics"].items()})
    assert values[0] == values[1]


def test_a_mean_needs_every_seed():
    line = mean_line({1: {2: {"fa": 1.0}, 4: {"fa": 2.0}}, 2: {2: {"fa": 3.0}, 4: {}}}, "fa")
    assert line == {2: 2.0}


def test_a_step_that_was_logged_and_evaluated_is_one_row(tmp_path):
    log = tmp_path / "scalars.jsonl"
    log.write_text('{"step": 2, "lr": 0.1}\n{"step": 2, "evaluation/fa": 5}\n{"step": 2, "lr": 0.2')
    assert read_scalars(log) == [{"step": 2, "lr": 0.1, "evaluation/fa": 5}]
