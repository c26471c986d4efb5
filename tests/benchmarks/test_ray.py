"""Stages on a real Ray: a cluster of this machine with two CPUs, and a GPU that exists in its
books alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stable_forgetting.benchmarks.pipeline.executors import RayExecutor, placed
from stable_forgetting.benchmarks.suite.suite import Resources
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.records import RunRecord

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
STEPS, EVERY = 300, 10
PLUGIN = """
import json
import os
from pathlib import Path

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.simple import Finetune


@METHODS.register("asker")
class Asker(Finetune):
    def unlearn(self, task):
        if "MARKS" in os.environ:
            import ray

            held = ray.get_runtime_context().get_assigned_resources()
            mark = {**held, "pid": os.getpid(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
            (Path(os.environ["MARKS"]) / f"{os.getpid()}.json").write_text(json.dumps(mark))
        return super().unlearn(task)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Ports are given: of unknown ones Ray expects to hear within 15 seconds."""
    marks = tmp_path_factory.mktemp("marks")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets are short
    sockets = [socket.socket() for _ in range(6)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    names = ["port", "metrics-export-port", "runtime-env-agent-port", "ray-client-server-port"]
    names += ["dashboard-agent-grpc-port", "dashboard-agent-listen-port"]
    ports = [one.getsockname()[1] for one in sockets]
    given = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    for one in sockets:
        one.close()
    about = ["start", "--head", "--block", "--no-monitor", f"--temp-dir={folder}"]
    about += ["--node-ip-address=127.0.0.1"]
    about += ["--num-cpus=2", "--num-gpus=1", "--object-store-memory=80000000"]
    about += ["--include-dashboard=false", "--include-log-monitor=false", "--disable-usage-stats"]
    quiet = {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *about, *given],
        env={**os.environ, **quiet, "MARKS": str(marks)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "runtime started" in line:
            break
    else:
        pytest.fail("Ray does not start: " + "".join(lines))
    yield SimpleNamespace(marks=marks, env={**quiet, "RAY_ADDRESS": f"127.0.0.1:{ports[0]}"})
    process.terminate()
    process.communicate(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


def results(store):
    """What must not depend on where stages ran."""
    outcome = {}
    for path in store.glob("stages/*/*"):
        if path.name == "record.json":
            record = RunRecord.load(path)
            outcome[path.parent.name] = record.metrics, record.dynamics
        elif path.suffix in (".safetensors", ".jsonl") and "split" not in path.parent.name:
            outcome[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    return outcome


def test_a_killed_task_is_started_again_where_its_resources_are(
    cluster, tiny_suite, cli, spawn, tmp_path
):
    plugin = tmp_path / "asker.py"
    plugin.write_text(PLUGIN)
    rows = {"original": None, "retrain": None}
    params = {"steps": STEPS, "epochs": None, "checkpoint_every": EVERY}
    rows["asker"] = {"params": params}
    needs = {"unlearn": {"gpus": 1, "memory": 0.25}}
    suite = tiny_suite(tmp_path, methods=rows, plugins=[plugin.name], resources=needs)
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    process = spawn("run", suite, "--store", shared, "--executor", "ray", **cluster.env)
    limit = time.monotonic() + 300
    while not list(shared.glob("unfinished/unlearn-*/checkpoint.safetensors")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "no checkpoint appeared"
        time.sleep(0.005)
    (mark,) = cluster.marks.iterdir()
    os.kill(int(mark.stem), signal.SIGKILL)
    assert not list(shared.glob("stages/unlearn-*")), "too late: the stage was complete"
    assert cli("run", suite, "--store", whole, "--executor", "inline").code == 0
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    marks = [json.loads(path.read_text()) for path in cluster.marks.iterdir()]
    assert len({mark["pid"] for mark in marks}) == 2, "the stage was started again"
    for mark in marks:
        held = {name: mark[name] for name in ("CPU", "GPU", "memory", "visible")}
        assert held == {"CPU": 1, "GPU": 1, "memory": 250_000_000, "visible": "0"}
    first, second = results(whole), results(shared)
    assert len(first) >= 9 and first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert "asker" in out


def test_what_a_task_raises_is_one_line(cluster, monkeypatch, caplog):
    def refuse():
        raise ConfigError("one line")

    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    executor = RayExecutor(2, (1, ()))
    try:
        error = executor.submit(refuse).exception(120)
        assert type(error) is ConfigError and str(error) == "one line"
        many = placed(executor, Resources(gpus=8))
        assert many.submit(refuse).running() and "no machine with 1 CPUs, 8 GPUs" in caplog.text
    finally:
        executor.shutdown()


def test_no_cluster_is_one_line(cluster, spawn, tiny_suite, tmp_path):
    env = {**cluster.env, "RAY_ADDRESS": "nowhere"}
    process = spawn("run", tiny_suite(), "--store", tmp_path, "--executor", "ray", **env)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and err.startswith("error: executor ray: ")
    assert len(err.splitlines()) == 1
