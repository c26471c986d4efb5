"""Every example runs: the scripts, the notebook's cells, and the suites beside the plugins."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys

import pytest
import torch
import yaml

from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.checks import check_benchmark
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.language.data.readers import READERS
from tests.benchmarks.test_plugin import EXAMPLES

SMALL = (
    "protocol.train.epochs=2",
    "protocol.train.warmup_steps=0",
    "protocol.data.train_images=200",
    "protocol.model.dim=16",
    "protocol.model.depth=1",
    "protocol.minimum_train_accuracy=0",
)
ROWS = "gd,down_to_chance,down_to_chance_sine"


@pytest.fixture
def registries(monkeypatch):
    """What an example registers is gone afterwards."""
    for registry in (BENCHMARKS, METHODS, READERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield
    for name in [name for name in sys.modules if "plugin_own_" in name]:
        del sys.modules[name]


def percents(line: str) -> dict[str, float]:
    values = ast.literal_eval(line[line.index("{") :])
    return {part: float(value.removesuffix(" %")) for part, value in values.items()}


def test_a_model_of_ones_own_forgets_and_keeps_the_rest(capsys):
    runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    before, after = map(percents, capsys.readouterr().out.splitlines())
    assert before["forget"] > 70 and after["forget"] < 10
    assert after["retain"] > before["retain"] - 15


def test_fifteen_lines_through_the_public_surface_alone():
    tree = ast.parse((EXAMPLES / "own_model.py").read_text())
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {n for n in ours if n.startswith("stable_forgetting")} == {"stable_forgetting.common"}
    (forget,) = [node for node in ast.walk(tree) if getattr(node, "name", "") == "forget"]
    assert forget.end_lineno - forget.lineno + 1 <= 17


def test_the_notebooks_cells_run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict[str, object] = {"__name__": "notebook"}
    with torch.random.fork_rng():
        for cell in cells:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    result, board = names["result"], names["board"]
    assert result.before["forget"]["accuracy"] > 70 and result.after["forget"]["accuracy"] < 10
    assert {row.label for row in board.rows} > {*names["methods"]} and board.complete
    assert "<table" in result._repr_html_() and "<table" in board._repr_html_()
    assert "forget: " in capsys.readouterr().out


def test_the_loss_runs_as_its_suite_says(registries, cli, tmp_path):
    asked = [word for setting in SMALL for word in ("--set", setting)]
    cli.ok(
        *("run", EXAMPLES / "own_loss.yaml", "--store", tmp_path),
        *("--seeds", "1", "--only", ROWS, "--set", "retrains=1", "--set", "compare=[]", *asked),
    )
    (folder,) = (tmp_path / "suites").iterdir()
    board = json.loads((folder / "leaderboard.json").read_text())
    rows = {row["row"]: row for row in board["rows"]}
    assert board["complete"] and {"down_to_chance", "down_to_chance_sine", "gd"} <= rows.keys()
    assert rows["down_to_chance"]["metrics"] != rows["gd"]["metrics"]


def test_the_benchmark_keeps_the_contract_and_its_suite_runs(registries, cli, tmp_path):
    path = EXAMPLES / "own_benchmark.yaml"
    load_suite(str(path))
    small = {**yaml.safe_load(path.read_text())["protocol"], "train": {"steps": 1}}
    results = check_benchmark("telephone_book", small, Runtime(device="cpu"))
    assert [result for result in results if not result.ok] == []
    asked = ("protocol.train.epochs=2", "defaults.steps=2", "retrains=1", "seeds=[1]")
    words = [word for setting in asked for word in ("--set", setting)]
    done = cli.ok("run", path, "--store", tmp_path, *words)
    assert "npo_gdr" in done.out and "unseen" in done.out


def test_the_help_of_apply_names_methods_of_the_guide(cli):
    text = (EXAMPLES.parent / "docs/use.md").read_text()
    rows = re.findall(r"^\| [\w ]+ \| (`.*) \| \[[\w-]+\]\(\.\./\S+LEADERBOARD", text, re.M)
    assert len(rows) == 5
    shown = {name for row in rows for name in re.findall(r"`(\w+)` [\d.]+", row)}
    words = " ".join(cli("apply", "--help").out.replace("│", " ").split())
    advice = words[words.index("a class of images:") : words.index("Give several")]
    named = set(re.findall(r"\b\w+\b", advice)) & set(METHODS.names())
    assert len(named) >= 6 and named <= shown
