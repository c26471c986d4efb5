"""The fault campaign, short, and the faults that need a test of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.errors import CheckpointError, DataError

ROOT = Path(__file__).resolve().parents[2]
KILLER = """
import os
import signal
from pathlib import Path

from stable_forgetting.common.methods.simple import Finetune
from stable_forgetting.common.base.registry import METHODS


@METHODS.register("killer")
class Killer(Finetune):
    def unlearn(self, task):
        marks = Path(os.environ["MARKS"])
        (marks / str(len(list(marks.iterdir())))).touch()
        if len(list(marks.iterdir())) <= int(os.environ["DEATHS"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().unlearn(task)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_a_short_campaign(tmp_path):
    """Every part, with a few trials each."""
    args = ["--seed", "11", "--minutes", "10", "--scale", "0.02"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.faults", *args, "--out", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "FAULTS.md").read_text(encoding="utf-8")
    assert text == done.stdout and "No promise was broken." in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 11 and all(int(row[1]) >= 1 for row in rows)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_rename_follows_the_syncing_of_what_it_moves(cli, tiny_suite, tmp_path, monkeypatch):
    synced: set[str] = set()
    moves: list[tuple[list[str], str]] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def fsync(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def moving(move):
        def moved(source, target, **how):
            if str(source).startswith(str(tmp_path)):
                paths = [Path(source), *Path(source).rglob("*")]
                late = [str(path) for path in paths if str(path) not in synced]
                moves.append((late, str(Path(target).parent)))
                synced.discard(str(Path(target).parent))
            move(source, target, **how)

        return moved

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", moving(rename))
    monkeypatch.setattr(os, "replace", moving(replace))
    rows = {"original": None, "retrain": None, "gd": {"params": {"checkpoint_every": 1}}}
    suite = tiny_suite(tmp_path, methods=rows, defaults={"steps": 3})
    assert cli("run", suite, "--store", tmp_path / "store", "--workers", 1).code == 0
    assert len(moves) > 15 and [late for late, _ in moves if late] == []
    assert all(folder in synced for _, folder in moves), "the new name is synced, too"


@pytest.fixture(scope="module")
def begun(tiny_suite, cli, tmp_path_factory):
    """A suite with a killer, and a store that has everything but the killer's stages."""
    root = tmp_path_factory.mktemp("begun")
    (root / "killer.py").write_text(KILLER)
    rows = {"original": None, "retrain": None, "killer": {"params": {"epochs": 1}}}
    short = {"evaluation": {"features": ["confidence"]}}
    suite = tiny_suite(root, methods=rows, plugins=["killer.py"], protocol=short)
    only = ("--only", "original,retrain")
    assert cli("run", suite, *only, "--store", root / "store", "--workers", 1).code == 0
    return suite, root / "store"


@pytest.mark.parametrize(("deaths", "code"), [(1, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_dead_worker_is_replaced_once(begun, spawn, tmp_path, deaths, code):
    suite, store = begun
    marks = tmp_path / "marks"
    marks.mkdir()
    shutil.copytree(store, tmp_path / "store")
    args = ("run", suite, "--store", tmp_path / "store", "--workers", 2)
    process = spawn(*args, MARKS=str(marks), DEATHS=str(deaths))
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, err
    assert err.count("a worker process died") == deaths and "Traceback" not in err
    assert ("killer" in out) == (code == 0)


def test_reports_sweep_what_killed_writers_left(tmp_path):
    old, new = tmp_path / ".a.md.77.0123abcd", tmp_path / ".a.md.78.0123abcd"
    other = tmp_path / ".keep.me.please"
    for path in (old, new, other):
        path.write_text("half")
        os.utime(path, (time.time() - 7200 * (path != new),) * 2)
    write_files(tmp_path, {"a.md": "whole"})
    assert {path.name for path in tmp_path.iterdir()} == {new.name, other.name, "a.md"}


def test_markdown_holds_no_html_of_others():
    attack = "<script>alert(1)</script> `<img src=x onerror=y>` a < b <3"
    rows = table(["x"], [[attack + "\n\n<b>"]])
    text = markdown.write([Section(attack, (attack,), rows, lines=(attack,))])
    assert "<script" not in text and "<img" not in text and "<b>" not in text
    assert "a < b <3" in text and len(text.splitlines()) == 9


@pytest.mark.parametrize("name", ["../outside.safetensors", "a/b.safetensors", "x.bin"])
def test_shard_names_are_bare(tmp_path, name):
    from stable_forgetting.language.apply.checkpoint import INDEX, read_causal

    (tmp_path / Path(name).name).write_text("a decoy")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        read_causal(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "\\ud800"}', "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        (json.dumps({"text": "x" * 10_000_001}), "longer than 10,000,000"),
        (json.dumps({"question": "q", "answer": "x" * 10_000_001}), "longer than 10,000,000"),
    ],
)
def test_texts_that_nobody_can_use(tmp_path, line, words):
    from stable_forgetting.language.data.files import read_items

    path = tmp_path / "f.jsonl"
    path.write_text(line)
    with pytest.raises(DataError, match=words):
        read_items(path, "forget")


@pytest.mark.skipif(sys.platform != "linux", reason="shell")
@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("{} show suites >&-", 0),
        ("PYTHONIOENCODING=ascii {} show gd_sine", 0),
        ("LOCAL_RANK=0 WORLD_SIZE=x {} show suites", 2),
        ("WORLD_SIZE=x RANK=3 {} show suites", 0),
    ],
)
def test_odd_streams_and_environments(shell, code):
    command = shell.format(f"{sys.executable} -m stable_forgetting.benchmarks")
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == (code == 2)
