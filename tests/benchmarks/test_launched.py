"""Suites run by two processes of a launcher: one store, filled by the first process alone."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from stable_forgetting.benchmarks.pipeline.executors import InlineExecutor, executing
from stable_forgetting.benchmarks.pipeline.runner import run_stage
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import DONE, StageStore

ROWS = {
    "original": None,
    "retrain": None,
    "gd_sine": {"params": {"evaluate_every": 3, "checkpoint_every": 2}},
    "gd_bad": {"method": "gd", "params": {"lr": 1e6}},
}
SPLIT = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
MODULE = ("-m", "stable_forgetting.benchmarks")
SECOND = """
import os

from stable_forgetting.common.methods.simple import Finetune
from stable_forgetting.common.base.registry import METHODS


@METHODS.register("second_fails")
class Fails(Finetune):
    def unlearn(self, task):
        if os.environ.get("RANK") == "1":
            raise RuntimeError("only here")
        return super().unlearn(task)
"""


@pytest.fixture(scope="module")
def suite(tiny_suite, tmp_path_factory):
    defaults = {"steps": 6, "log_every": 2}
    return tiny_suite(tmp_path_factory.mktemp("launched"), methods=ROWS, defaults=defaults)


@pytest.fixture(scope="module")
def torchrun(spawn):
    """Starts ``unlearn ARGS`` under torchrun."""

    def start(*args, count=2, **env):
        words = ["--standalone", "--nproc-per-node", str(count), *MODULE, *map(str, args)]
        script = f"from torch.distributed.run import main; main({words})"
        return spawn(script=script, **env)

    return start


@pytest.fixture(scope="module")
def launch(torchrun):
    """Runs ``unlearn ARGS`` under torchrun, with two processes or ``count``; code, out and err."""

    def run(*args, **options):
        process = torchrun(*args, **options)
        try:
            out, err = process.communicate(timeout=400)
        finally:
            process.kill()
        return process.returncode, out, err

    return run


@pytest.fixture(scope="module")
def stores(suite, launch, cli, tmp_path_factory):
    """Name -> (store, what was printed): by one process, by two, and by two that split models."""
    root = tmp_path_factory.mktemp("stores")
    args = ("--device", "cpu")
    alone = cli.ok("run", suite, "--store", root / "one", *args)
    found = {"one": (root / "one", alone.out)}
    for name, env in (("two", {}), ("split", SPLIT)):
        code, out, err = launch("run", suite, "--store", root / name, *args, **env)
        assert code == 0, err
        found[name] = (root / name, out)
    return found


def files(store):
    """Everything but TensorBoard's files, whose names hold the time."""
    found = (path.relative_to(store) for path in store.rglob("*") if path.is_file())
    return {path for path in found if path.parts[0] != "tensorboard"}


def numbers(value):
    """Every metric of a record."""
    return {key: math.nan if number is None else number for key, number in value.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "split"])
def test_launched_processes_fill_the_store_that_one_fills(stores, nothing_half, name):
    (one, _), (store, out) = stores["one"], stores[name]
    nothing_half(store)
    assert files(store) == files(one)
    assert not any((store / "unfinished").iterdir())
    assert out.count("Report ") == 1, "the first process alone speaks"
    for path in (store / "stages").rglob(DONE):
        done = json.loads(path.read_text())
        before = json.loads((one / path.relative_to(store)).read_text())
        assert done["status"] == before["status"]
        assert (before["environment"]["processes"], done["environment"]["processes"]) == (1, 2)
    for path in (one / "stages").rglob("record.json"):
        first, second = (
            json.loads((root / path.relative_to(one)).read_text())["metrics"]
            for root in (one, store)
        )
        assert numbers(second) == pytest.approx(numbers(first), rel=1e-3, abs=1e-3, nan_ok=True)
    for path in (one / "stages").rglob("scores.safetensors"):
        first, second = load_file(path), load_file(store / path.relative_to(one))
        for key, value in first.items():
            torch.testing.assert_close(second[key], value, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_tensorboard_has_one_file_per_run(stores):
    for store, _ in stores.values():
        boards = [path.parent for path in store.rglob("events.out.tfevents.*")]
        assert boards and len(boards) == len(set(boards))


@pytest.mark.slow
def test_a_second_launch_executes_nothing(stores, suite, launch):
    store, _ = stores["two"]
    before = {p: p.stat().st_mtime_ns for p in (store / "stages").rglob("*")}
    code, out, err = launch("run", suite, "--store", store, "--device", "cpu")
    assert code == 0, err
    assert out.count("13 stages, 13 of them already in the store") == 1
    assert before == {p: p.stat().st_mtime_ns for p in (store / "stages").rglob("*")}


@pytest.mark.slow
def test_a_failure_of_one_process_ends_all(stores, launch, tiny_suite, tmp_path):
    store = shutil.copytree(stores["two"][0], tmp_path / "store")
    plugin = tmp_path / "second.py"
    plugin.write_text(SECOND)
    rows = {**ROWS, "second_fails": None}
    path = tiny_suite(tmp_path, methods=rows, defaults={"steps": 6, "log_every": 2})
    code, _, err = launch("run", path, "--store", store, "--device", "cpu", "--plugin", plugin)
    assert code == 1
    assert "RuntimeError: only here" in err
    logs = {log.stem.partition("-process-")[2]: log for log in (store / "failed").iterdir()}
    assert "RuntimeError: only here" in logs["1"].read_text()
    assert not [
        folder for folder in (store / "stages").glob("[!.]*") if not (folder / DONE).exists()
    ]


@pytest.fixture(scope="module")
def longer(tiny_suite, tmp_path_factory, cli):
    """A suite with many checkpoints, and the store of one process."""
    folder = tmp_path_factory.mktemp("longer")
    params = {"evaluate_every": 1, "checkpoint_every": 2, "batch_size": 16}
    rows = {"original": None, "retrain": None, "gd": {"params": params}}
    rows["gd_sine"] = {"params": params}
    path = tiny_suite(folder, methods=rows, defaults={"steps": 30})
    args = ("--workers", 1, "--device", "cpu")
    cli.ok("run", path, "--store", folder / "one", *args)
    return path, folder / "one"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("row", "first", "second"), [("gd", 2, 4), ("gd_sine", 4, 2)])
def test_a_split_suite_goes_on_with_another_number(
    longer,
    torchrun,
    launch,
    nothing_half,
    tmp_path,
    row,
    first,
    second,
    find_stage,
    kill_at_checkpoint,
):
    """Killed in a row's training, of whole weights or of an adapter."""
    path, one = longer
    args = ("run", path, "--store", tmp_path, "--device", "cpu")
    stage = find_stage(path, tmp_path, "unlearn", f"{row}/seed-1")
    kill_at_checkpoint(torchrun(*args, count=first, **SPLIT), tmp_path, stage, workers=True)
    again = time.time()
    code, _, err = launch(*args, count=second, **SPLIT)
    assert code == 0, err
    nothing_half(tmp_path)
    assert files(tmp_path) == files(one)
    folder = StageStore(tmp_path).folder(stage.kind, stage.key)
    assert min(p.stat().st_mtime for p in folder.rglob("0*.safetensors")) < again, "went on"
    done = json.loads((folder / DONE).read_text())
    assert done["environment"]["processes"] == second
    for record in (one / "stages").rglob("record.json"):
        mine, whole = (
            json.loads((root / record.relative_to(one)).read_text())["metrics"]
            for root in (tmp_path, one)
        )
        assert numbers(mine) == pytest.approx(numbers(whole), rel=1e-3, abs=1e-3, nan_ok=True)


# What needs no launch ----------------------------------------------------------------------------


@pytest.fixture
def second(monkeypatch):
    """This process believes to be the second of two; what the first says is in the list."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    monkeypatch.setattr(processes, "gathered", lambda text: said)
    monkeypatch.setattr(processes, "wait_for_all", lambda: None)
    monkeypatch.setattr("stable_forgetting.common.train.launch.join_processes", lambda device: None)
    return said


@pytest.fixture
def split_stage(suite, tmp_path, find_stage):
    stage = find_stage(suite, tmp_path, "split", "split/seed-1")
    return stage, Runtime(store=tmp_path, device="cpu")


def test_processes_at_different_stages_stop(second, split_stage):
    stage, runtime = split_stage
    second.append("0" + "f" * len(stage.key))
    with pytest.raises(DataError, match="changed while the processes planned; run again"):
        run_stage(stage, runtime)


@pytest.mark.parametrize("complete", ["0", "1"])
def test_a_store_that_is_not_shared_is_named(second, split_stage, complete):
    stage, runtime = split_stage
    second.append(complete + stage.key)
    with pytest.raises(DataError, match=r"process 1 does not see split/seed-1.* all processes sha"):
        run_stage(stage, runtime)
    assert not list(runtime.store.iterdir()), "the second process writes nothing"


def test_launched_processes_share_every_stage_without_a_pool(second, monkeypatch):
    monkeypatch.setattr(
        "stable_forgetting.benchmarks.pipeline.executors.prepare_worker", lambda *_, **__: None
    )
    with executing(8, 1, ()) as executor:
        assert isinstance(executor, InlineExecutor)


def test_a_world_size_without_a_launcher_means_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (processes.count(), processes.index(), processes.is_main()) == (1, 0, True)
