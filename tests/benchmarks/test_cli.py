from __future__ import annotations

import errno
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from stable_forgetting.benchmarks.cli import main as cli_module
from stable_forgetting.benchmarks.cli import run as commands
from stable_forgetting.benchmarks.pipeline import executors
from stable_forgetting.benchmarks.pipeline.training import Original
from stable_forgetting.benchmarks.suite.suite import sweeps
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS

LOAD = "stable_forgetting.benchmarks.cli.options.load_suite"
COMMANDS = sorted(command.callback.__name__ for command in cli_module.app.registered_commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples(command, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = cli(command, "--help")
    assert shown.code == 0 and shown.err == ""
    head, found, tail = shown.out.rpartition("Example")
    assert found and len(head) > 100
    title, *examples = tail.splitlines()
    assert title in (":", "s:") and examples
    for example in examples:  # one a line, and nothing after them
        assert re.match(
            r"   (unlearn|accelerate launch .* stable_forgetting\.benchmarks) \w", example
        )


def test_no_arguments_is_help(cli):
    bare, asked = cli(), cli("--help")
    assert bare.code == asked.code == 0
    assert bare.out == asked.out and "doctor" in bare.out and "Examples" in bare.out
    version = importlib.metadata.version("stable-forgetting")
    assert cli("--version").out == f"stable-forgetting {version}\n"


def test_show_lists_everything(cli):
    lists = {"methods": METHODS.names(), "benchmarks": BENCHMARKS.names(), "sweeps": sweeps()}
    for what, names in lists.items():
        shown = cli.ok("show", what)
        for name in names:
            assert re.search(rf"^\s*{re.escape(name)}\s", shown.out, re.M), name
    found = cli("show", "--filter", "o").out
    for name in ("npo_gdr", "tofu", "tofu-small", "tofu-small-bound"):
        assert re.search(rf"^\s*{re.escape(name)}\s", found, re.M), name


def test_show_begins_with_the_suites_and_names_the_other_lists(cli):
    shown = cli("show").out
    assert shown == cli("show", "suites").out
    assert re.search(r"^  digits .* -class", shown, re.M) and "gd_lora" not in shown
    assert all(f" {what}," in shown for what in ("methods", "sweeps", "benchmarks"))


@pytest.mark.parametrize("name", METHODS.names())
def test_show_tells_of_every_method(name, cli):
    shown = cli("show", name)
    assert shown.code == 0 and shown.err == ""
    assert name in shown.out and "Formula:" in shown.out and "reads" in shown.out
    assert name != "gd_weight_clip" or "[-c, c]" in shown.out, "brackets are printed"
    assert re.search(r"^paper   \S", shown.out, re.MULTILINE)
    for preset in METHODS[name].presets:
        assert f"preset {preset}" in shown.out


def test_show_suite_and_benchmark(cli, filled):
    assert "scenario: {kind: class" in cli("show", "digits-class").out
    assert "tiny-class" in cli("show", filled.paths["class"]).out
    shown = cli("show", "image_classification").out
    assert "mia_auc" in shown and "forget_loss" in shown


def test_plan_counts_what_is_done(filled, cli, tmp_path):
    path = filled.paths["class"]

    def counts(store):
        shown = cli.ok("plan", path, "--store", store)
        lines = (line.split() for line in shown.out.splitlines())
        rows = [x for x in lines if len(x) == 4 and x[3].isdigit()]
        assert all(int(x[1]) == int(x[2]) + int(x[3]) for x in rows)
        return {x[0]: (int(x[1]), int(x[3])) for x in rows}

    fresh = counts(tmp_path / "none")
    assert fresh == {
        "split": (1, 0),
        "original": (1, 0),
        "retrain": (2, 0),
        "unlearn": (9, 0),
        "score": (12, 0),
        "measure": (12, 0),
    }
    assert counts(filled.store) == {kind: (n, n) for kind, (n, _) in fresh.items()}
    assert not (tmp_path / "none").exists(), "planning writes nothing"
    keys = cli("plan", path, "--keys").out
    assert len(re.findall(r"\b[0-9a-f]{20}\b", keys)) == 37


def test_one_stage_runs_alone(cli, tmp_path, tiny_suite, find_stage):
    path = tiny_suite(tmp_path)
    store = tmp_path / "store"
    key = find_stage(path, store, "split", "split/seed-1").key
    done = cli("run", path, "--stage", key[:12], "--store", store)
    assert done.code == 0 and "split/seed-1: ok" in done.out
    assert [p.name for p in (store / "stages").iterdir()] == [f"split-{key[:20]}"]
    told = json.loads((store / "stages" / f"split-{key[:20]}" / "done.json").read_text())
    assert told["sizes"]["forget"] + told["sizes"]["retain"] == 200


@pytest.mark.parametrize("where", [(commands, "execute"), (Original, "work")])
def test_an_interruption_is_one_line_and_no_failure(where, cli, monkeypatch, tiny_suite, tmp_path):
    monkeypatch.setattr(*where, Mock(side_effect=KeyboardInterrupt))
    done = cli("run", tiny_suite(tmp_path), "--store", tmp_path / "store")
    assert done.code == 130 and not (tmp_path / "store" / "failed").exists()
    assert done.err == "interrupted; what is complete is kept, run again to continue\n"


@pytest.mark.parametrize(
    ("error", "start", "end"),
    [
        (DataError("a\nsecond " + "word " * 80 + "[bold]end"), "error: a second word", "[bold]end"),
        (OSError(errno.ENOSPC, "No space left", "/store/x"), "error: /store/x: No space left", ""),
    ],
)
def test_what_the_user_can_mend_stays_on_one_line(cli, monkeypatch, error, start, end):
    monkeypatch.setattr(LOAD, Mock(side_effect=error))
    done = cli("plan", "digits-class")
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert done.err.startswith(start) and end in done.err


def test_a_bug_is_not_hidden(cli, monkeypatch):
    monkeypatch.setattr(LOAD, Mock(side_effect=ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        cli("plan", "digits-class")


def test_a_reader_that_leaves_early_is_no_error(spawn):
    process = spawn("show", "digits-class")
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 1)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_check_passes_and_fails(cli, tmp_path):
    done = cli("check", "gd_sine")
    assert done.code == 0 and "ok  gd_sine:" in done.out
    plugin = tmp_path / "sloppy.py"
    plugin.write_text(
        "from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod\n"
        "from stable_forgetting.common.base.registry import METHODS\n"
        '@METHODS.register("sloppy")\n'
        "class Sloppy(UnlearningMethod):\n"
        '    "Reads what it has not declared, which the check must find out."\n'
        '    info = MethodInfo(1, "-", frozenset({"forget"}))\n'
        "    def unlearn(self, task):\n"
        '        task.indices("retain")\n'
        "        return task.model\n"
    )
    done = cli("check", "sloppy", "--plugin", plugin)
    assert done.code == 1 and "broken  sloppy:" in done.out
    assert "'retain'" in done.out, "brackets in details are printed"


def test_abandoned_workers_end_at_once():
    import time

    pool = executors.WorkerPool(1, (1, ()))
    assert pool.submit(abs, -1).result() == 1
    pool.submit(time.sleep, 600)
    (worker,) = pool._pool._processes.values()
    pool.abandon()
    # the pool's own thread reaps it too: whoever comes second learns the code a little later
    end = time.monotonic() + 30
    while worker.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    assert worker.exitcode == 128 + signal.SIGTERM


def test_one_worker_works_in_this_process_and_more_in_a_pool():
    with executors.executing(1, 1, ()) as inline:
        assert isinstance(inline, executors.InlineExecutor)
        assert inline.submit(divmod, 7, 2).result() == (3, 1)
        assert isinstance(inline.submit(divmod, 7, 0).exception(), ZeroDivisionError)
    with executors.executing(2, 1, ()) as pool:
        assert isinstance(pool, executors.WorkerPool)


def test_installed_command_is_the_module():
    entry = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['unlearn', 'show', 'benchmarks']\n"
         "from importlib.metadata import entry_points\n"
         "[p] = [p for p in entry_points(group='console_scripts') if p.name == 'unlearn']\n"
         "p.load()()"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert entry.returncode == 0 and "image_classification" in entry.stdout


@pytest.mark.parametrize(
    ("suite", "shares"),
    [
        ("tofu-phi-1.5-forget10", {"0.138 %": "gd_sine", "0.249 %": "loku"}),
        ("tofu-llama2-7b-forget01", {"0.086 %": "gd_sine", "0.148 %": "loku"}),
    ],
)
def test_show_counts_what_adapters_train(suite, shares, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = cli("show", suite)
    assert shown.code == 0 and shown.err == ""
    table = shown.out.partition("Adapters, counted")[2]
    for share, row in shares.items():
        line = next(line for line in table.splitlines() if share in line)
        assert row in line and " 4 " in line
    assert "place by the distance" not in table, "an adapter's rank is no place in a leaderboard"
    words = "".join(shown.out.split())
    assert ("thepaperprints1.6%" in words) == ("phi" in suite), "contrasted where it is claimed"
