"""A peer's method as a plugin file: the one of CONTRIBUTING, taken from its text and run.

Nothing of ours is edited: a file of at most 60 lines registers, passes the contract, is shown and
is a row of a suite beside our own.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

import benchmarks
from common.base.registry import METHODS

ROOT = Path(benchmarks.__file__).resolve().parents[1]
LONGEST = 60


@pytest.fixture(scope="module")
def walk_through():
    """(plugin, commands, suite) as CONTRIBUTING prints them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (plugin,) = re.findall(r"```python\n(# mine\.py\n.*?)```", text, re.DOTALL)
    (commands,) = re.findall(r"```bash\n(unlearn check .*?)```", text, re.DOTALL)
    (suite,) = re.findall(r"<<'Y'\n(.*?)^Y$", commands, re.DOTALL | re.MULTILINE)
    return plugin, commands, yaml.safe_load(suite)


@pytest.fixture
def plugin(walk_through, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(walk_through[0])
    return path


def test_the_walk_through_is_short_and_new(walk_through):
    text, commands, suite = walk_through
    (name,) = re.findall(r'METHODS\.register\("(\w+)"\)', text)
    assert len(text.splitlines()) <= LONGEST
    assert name not in METHODS, "the walk-through must not collide with a method of ours"
    assert commands.count(f"{name} --plugin mine.py") == 2
    assert list(suite["methods"]) == [name] and suite["compare"][0][0] == name
    assert (ROOT / suite["extends"]).is_file()


def test_the_walk_through_passes_the_contract_and_is_shown(plugin, cli):
    done = cli("check", "negate", "--plugin", plugin)
    assert done.code == 0 and "ok  negate: 16 of 16 checks pass" in done.out
    shown = cli("show", "negate", "--plugin", plugin)
    assert shown.code == 0 and "2503.05657" in shown.out and "layer:" in shown.out
    assert "negate" not in METHODS and not [m for m in sys.modules if m.endswith("plugin_mine")]


def test_the_walk_through_is_a_row_beside_ours(walk_through, plugin, copied, tiny_suite, cli):
    row = walk_through[2]["methods"]["negate"]
    rows = {"original": None, "retrain": None, "finetune": None, "negate": row}
    compare = walk_through[2]["compare"]
    path = tiny_suite(plugin.parent, suite="mine", methods=rows, compare=compare, retrains=2)
    data = yaml.safe_load(path.read_text())
    data["methods"]["negate"] = {"params": {**row["params"], "steps": 6}}
    path.write_text(yaml.safe_dump(data))
    done = cli("run", path, "--store", copied.store, "--workers", 1, "--plugin", plugin)
    assert done.code == 0 and done.err == ""
    board = json.loads((copied.store / "suites/mine/leaderboard.json").read_text())
    found = {found["row"]: found for found in board["rows"]}
    assert board["complete"] and found["negate"]["seeds"] == [1]
    assert found["negate"]["metrics"]["ra"] != found["original"]["metrics"]["ra"]
    assert "of negate − finetune:" in " ".join(done.out.split())
