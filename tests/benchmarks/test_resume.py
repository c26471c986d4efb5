from __future__ import annotations

import json
import re
import shutil
import sys
import time
from concurrent.futures import Executor, Future
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stable_forgetting.benchmarks.leaderboard.run import Lines
from stable_forgetting.benchmarks.pipeline import schedule
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.runner import BUSY
from stable_forgetting.benchmarks.pipeline.unlearning import training
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.protocols import FitResult
from stable_forgetting.common.train.tracking import Tracker, read_scalars

STEPS, EVERY = 160, 10
ROWS = {
    "original": None,
    "retrain": None,
    "gd_sine": {"params": {"checkpoint_every": EVERY, "log_every": 1}},
}


@pytest.fixture(scope="module")
def suite(tiny_suite, tmp_path_factory):
    return tiny_suite(
        tmp_path_factory.mktemp("resume"),
        suite="resume",
        methods=ROWS,
        defaults={"steps": STEPS},
        protocol={
            "train": {"epochs": None, "steps": STEPS, "checkpoint_every": EVERY, "batch_size": 16}
        },
    )


def contents(store, suite):
    """Everything that must not depend on interruptions."""
    found = {}
    store = StageStore(store)
    for stage in make_plan(load_suite(str(suite)), store).stages():
        folder = store.folder(stage.kind, stage.key)
        for path in folder.iterdir():
            if stage.kind == "split":
                if path.suffix == ".safetensors":  # the order of its metadata is not fixed
                    found[stage.kind, stage.name, path.name] = ForgetSplit.load(path).digest
            elif path.suffix in (".safetensors", ".jsonl") or path.name == "adapter.json":
                found[stage.kind, stage.name, path.name] = path.read_bytes()
        if stage.kind == "measure":
            record = RunRecord.load(folder / "record.json")
            found[stage.kind, stage.name, "metrics"] = (record.metrics, record.dynamics)
    return found


def wait_for_end(workers):
    limit = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < limit, "a worker outlived its killed parent"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="a worker dies with its parent on Linux")
def test_a_killed_run_ends_with_the_same_bits(
    suite, cli, spawn, tmp_path, caplog, find_stage, kill_at_checkpoint
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    cli.ok("run", suite, "--store", whole)

    # in a worker process: all of Original and Retrain, and half of the unlearning
    args = ("run", suite, "--store", broken)
    stage = find_stage(suite, broken, "unlearn", "gd_sine/seed-1")
    workers = kill_at_checkpoint(spawn(*args, "--workers", 2), broken, stage)
    assert workers
    wait_for_end(workers)
    assert len(list((broken / "stages").glob(".unlearn-*"))) == 1

    # the rest in this process
    with caplog.at_level("INFO"):
        done = cli(*args)
    assert done.code == 0 and done.err == "", done.err
    resumed = re.search(r"resumed at step (\d+) from .*unlearn-", caplog.text)
    assert resumed and 0 < int(resumed.group(1)) < STEPS and int(resumed.group(1)) % EVERY == 0
    first, second = contents(whole, suite), contents(broken, suite)
    assert first.keys() == second.keys() and len(first) > 12
    assert [key for key in first if first[key] != second[key]] == []
    assert not list((broken / "stages").glob(".*")), "no temporary folder is left"
    assert not list((broken / "unfinished").glob("*"))
    log = second["unlearn", "gd_sine/seed-1", "scalars.jsonl"].decode()
    assert [json.loads(line)["step"] for line in log.splitlines()] == [*range(1, STEPS + 1)]


def test_a_checkpoint_that_cannot_be_used_starts_the_stage_again(
    suite, cli, tmp_path, caplog, find_stage
):
    stage = find_stage(suite, tmp_path, "original", "original/seed-1")
    checkpoint = StageStore(tmp_path).scratch("original", stage.key) / "checkpoint.safetensors"
    for content, words in ((b"\x00garbage", "damaged checkpoint"), (None, "of another run")):
        checkpoint.parent.mkdir(parents=True)
        if content is None:
            save_file({"x": np.zeros(1)}, checkpoint, metadata={"identity": "other"})
        else:
            checkpoint.write_bytes(content)
        cli.ok("run", suite, "--stage", stage.key, "--store", tmp_path)
        assert words in caplog.messages[-1] and "starts again" in caplog.messages[-1]
        assert not checkpoint.parent.exists()
        folder = StageStore(tmp_path).folder("original", stage.key)
        steps = [row["step"] for row in read_scalars(folder / "scalars.jsonl")]
        assert steps == [1, *range(10, STEPS + 1, 10)]
        shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="a worker dies with its parent on Linux")
@pytest.mark.parametrize("delay", [0.0, 0.2, 0.6])
def test_a_parent_killed_at_once_leaves_no_worker(suite, spawn, tmp_path, delay):
    args = ("run", suite, "--store", tmp_path, "--workers", 2)
    process = spawn(*args)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    limit = time.monotonic() + 240
    while len(workers := children.read_text().split()) < 2:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    process.communicate(timeout=60)
    wait_for_end(workers)


@pytest.mark.slow
def test_side_by_side_runs_share_the_stages(suite, cli, spawn, tmp_path):
    """Two runs on one store: every stage is worked on once, and no log row is written twice."""
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    cli.ok("run", suite, "--store", whole)
    runs = [spawn("run", suite, "--store", shared, "--workers", 1) for _ in range(2)]
    for process in runs:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    assert contents(whole, suite) == contents(shared, suite)
    assert not list((shared / "unfinished").glob("*"))
    assert not list((shared / "failed").glob("*"))


@pytest.mark.parametrize("late", [True, False], ids=["busy", "done once it is planned"])
def test_a_run_goes_on_where_another_decided_its_tuning(
    tiny_suite, put_record, tmp_path, monkeypatch, late
):
    monkeypatch.setattr(schedule, "POLL", 0.001)
    grids = {"default": {"lr": [1e-4, 1e-3]}}
    path = tiny_suite(
        methods={"original": None, "retrain": None, "gd": None},
        tune={"seeds": [0], "trials": 2, "grids": grids},
    )
    store, values = StageStore(tmp_path), dict.fromkeys(("ua", "ra", "va", "mia_validation"), 9.0)

    def complete(stage):
        if stage.kind == "measure":
            put_record(store, stage, values)
        else:
            with store.writing(stage.kind, stage.key, {"status": "ok"}):
                pass

    class Elsewhere(Executor):
        def submit(self, fn, stage, runtime, **options):
            complete(stage)
            future = Future()
            future.set_result(BUSY)
            return future

    plans = []

    def planned(suite, store):
        plans.append(make_plan(suite, store))
        for stage in () if late or len(plans) > 1 else plans[0].stages():
            complete(stage)
        return plans[-1]

    suite, watcher = load_suite(str(path)), Lines(shown=False)
    done = schedule.run_suite(
        suite, Runtime(tmp_path), Elsewhere(), watcher=watcher, planner=planned
    )
    assert plans[0].waiting == ["gd"] and not plans[-1].waiting
    assert done.plan is plans[-1] and not done.failed and done.executed == 0
    assert all(store.done(stage.kind, stage.key) for stage in done.plan.stages())


def test_a_cost_counts_every_sitting(tiny):
    source = tiny.Source()
    task = tiny.task(source, tiny.split(source))
    task.results += [FitResult(4, 70.0, earlier=60.0), FitResult(2, 30.0, earlier=30.0)]
    with training(task) as outcome:
        outcome.model = task.model
    assert outcome.cost["seconds"] >= 90 and outcome.cost["steps"] == 6


def test_the_log_is_rewound_to_the_checkpoint(tmp_path):
    log = tmp_path / "scalars.jsonl"
    rows = [json.dumps({"step": step, "loss/x": step / 7}) for step in (1, 10, 20, 30)]
    log.write_text("\n".join(rows) + '\n{"step": 40, "lo')
    with closing(Tracker(log)) as tracker:
        tracker.rewind(20)
        tracker.scalars(21, {"x": 1.0})
    assert log.read_text().splitlines() == [*rows[:3], '{"step": 21, "x": 1.0}']
