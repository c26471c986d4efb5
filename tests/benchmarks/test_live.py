"""The page of a run as it goes: what it shows comes from the store."""

from __future__ import annotations

import json
import math
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest

from stable_forgetting.benchmarks.leaderboard import live
from stable_forgetting.benchmarks.leaderboard.live import live_page, read_losses, serve, under_way
from stable_forgetting.benchmarks.pipeline.context import SCALARS
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.position import PositionFile
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.tracking import Tracker


@pytest.fixture
def begun(tiny_suite, tmp_path):
    """A suite of which nothing is complete and one training runs."""
    suite = load_suite(str(tiny_suite(methods={"original": None, "retrain": None, "gd": None})))
    store = StageStore(tmp_path / "store")
    stage = next(s for s in make_plan(suite, store).stages() if s.kind == "retrain")
    folder = store.scratch(stage.kind, stage.key)
    folder.mkdir(parents=True)
    PositionFile(folder)(3, 12, 0.75)
    return suite, store, stage


def test_a_training_that_runs_is_shown_with_its_step(begun):
    suite, store, stage = begun
    running = under_way(list(make_plan(suite, store).stages()), store)
    assert [s.key for s, _ in running] == [stage.key]
    page = live_page(suite, store)
    assert all(text in page for text in ("0 of ", "3 of 12", stage.name, "http-equiv='refresh'"))


def test_a_training_without_a_step_for_long_is_not_running(begun, monkeypatch):
    _, store, stage = begun
    later = time.time() + 1000
    monkeypatch.setattr("stable_forgetting.benchmarks.leaderboard.live.time.time", lambda: later)
    assert under_way([stage], store) == []


def test_losses_come_from_the_log_of_a_training(begun):
    suite, store, stage = begun
    log = store.scratch(stage.kind, stage.key) / SCALARS
    with closing(Tracker(log)) as tracker:
        for step in (1, 2):
            tracker.scalars(step, {"loss/retain_loss": 1 / step, "lr": 0.1})
        tracker.scalars(3, {"loss/retain_loss": math.nan})
    assert read_losses(log) == {"retain_loss": {1: 1.0, 2: 0.5}}
    assert read_losses(log.with_name("none")) == {}
    assert "<svg" in live_page(suite, store)


def test_a_complete_run_shows_its_table_and_looks_no_more(copied):
    suite = load_suite(str(copied.paths["random"]))
    page = live_page(suite, StageStore(copied.store))
    assert "gd_sine" in page and "http-equiv='refresh'" not in page


def test_the_page_is_served_on_this_machine_and_says_what_is_damaged(copied):
    suite, store = load_suite(str(copied.paths["random"])), StageStore(copied.store)
    with serve(suite, store, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(address) as answer:
            assert "gd_sine" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/etc/passwd")
        with pytest.raises(ConfigError, match=r"--port .*: .*; give another one"):
            serve(suite, store, server.server_port)
        done = next(copied.store.glob("stages/unlearn-*/done.json"))
        done.write_text(json.dumps({"key": "other"}))
        with urllib.request.urlopen(address) as answer:
            assert "belongs to another stage" in answer.read().decode()
        server.shutdown()


def test_a_page_that_is_closed_while_it_is_made_is_no_error(monkeypatch, capfd):
    asked, closed, over = (threading.Event() for _ in range(3))

    def page(*_):
        asked.set()
        closed.wait(10)
        return "x" * 10_000_000

    monkeypatch.setattr(live, "live_page", page)
    with serve(None, None, 0) as server:
        monkeypatch.setattr(server, "shutdown_request", lambda request: over.set())
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with socket.create_connection(server.server_address) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reader.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert asked.wait(10)
        closed.set()
        assert over.wait(10)
        server.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_cannot_be_is_refused_in_a_line(cli, one_line_error, tmp_path):
    asked = cli("report", "digits-class", "--store", tmp_path, "--watch", "--port", 99999)
    assert "65535" in one_line_error(asked)
    asked = cli("report", "--records", tmp_path, "--watch")
    assert "give a suite" in one_line_error(asked)


def test_tensorboard_needs_events(tiny_suite, tmp_path, cli, one_line_error):
    path, store = tiny_suite(suite="mine"), tmp_path / "my runs"
    said = one_line_error(cli("report", path, "--store", store, "--board"))
    assert "no events of mine" in said
    assert said.rstrip().endswith(f"run: unlearn run {path} --store '{store}'"), said


@pytest.mark.slow
def test_tensorboard_shows_the_curves(tiny_suite, tmp_path, spawn):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard/mine/gd")) as events:
        events.add_scalar("loss/forget", 0.5, 1)
    asked = ("report", tiny_suite(suite="mine"), "--store", tmp_path, "--board", "--port", 0)
    process = spawn(*asked)
    try:
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        with urllib.request.urlopen(f"{address}data/runs", timeout=30) as answer:
            assert json.load(answer) == ["gd"]
    finally:
        process.terminate()
        process.communicate(timeout=30)
