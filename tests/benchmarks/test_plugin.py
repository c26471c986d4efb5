"""A plugin file: the examples of README and CONTRIBUTING, taken from their texts.

Nothing of ours is edited: a file of at most 60 lines registers, passes the contract, is shown and
is a row of a suite beside our own.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from torch.utils.data import Subset

from stable_forgetting import benchmarks
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import find_suite, suite_names
from stable_forgetting.common import METHODS, PHIS
from stable_forgetting.common.base.registry import load_plugins
from stable_forgetting.common.store.stages import StageStore

ROOT = Path(benchmarks.__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LONGEST = 60


def blocks(name: str) -> list[str]:
    """Python of a Markdown file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def walk_through():
    """(plugin, commands, suite) as CONTRIBUTING prints them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    plugin, *_ = blocks("CONTRIBUTING.md")
    (commands,) = re.findall(r"```bash\n(unlearn check .*?)```", text, re.DOTALL)
    (suite,) = re.findall(r"<<'Y'\n(.*?)^Y$", commands, re.DOTALL | re.MULTILINE)
    assert plugin == (EXAMPLES / "own_loss.py").read_text()
    assert suite == (EXAMPLES / "own_loss.yaml").read_text()
    return plugin, commands, yaml.safe_load(suite)


@pytest.fixture(scope="module")
def loaded_example():
    entries = dict(METHODS._entries)
    load_plugins([str(EXAMPLES / "own_loss.py")], installed=False)
    yield
    METHODS._entries.clear()
    METHODS._entries.update(entries)
    for module in [m for m in sys.modules if m.endswith("plugin_own_loss")]:
        del sys.modules[module]


@pytest.fixture
def plugin(walk_through, tmp_path):
    path = tmp_path / "own_loss.py"
    path.write_text(walk_through[0])
    return path


def test_the_walk_through_is_short_and_new(walk_through):
    text, commands, suite = walk_through
    (name,) = re.findall(r'METHODS\.register\("(\w+)"\)', text)
    assert len(text.splitlines()) <= LONGEST
    assert name not in METHODS, "the walk-through must not collide with a method of ours"
    assert commands.count(f"{name} --plugin own_loss.py") == 2
    assert suite["plugins"] == ["own_loss.py"] and "unlearn run own_loss.yaml\n" in commands
    assert list(suite["methods"]) == [name, f"{name}_sine"] and suite["compare"][0][0] == name
    assert suite["extends"] in suite_names()


def test_the_walk_through_passes_the_contract_and_is_shown(plugin, cli):
    for name in ("down_to_chance", "down_to_chance_sine"):
        done = cli("check", name, "--plugin", plugin)
        assert done.code == 0 and f"ok  {name}: 16 of 16 checks pass" in done.out
    shown = cli("show", "down_to_chance", "--plugin", plugin)
    assert shown.code == 0 and "max(0, log(C p_y))" in shown.out and "forget_weight:" in shown.out
    assert "down_to_chance" not in METHODS
    assert not [m for m in sys.modules if m.endswith("plugin_own_loss")]


def test_the_walk_throughs_activation_is_registered_and_used(cli, tmp_path, monkeypatch):
    _, text = blocks("CONTRIBUTING.md")
    monkeypatch.setattr(PHIS, "register", lambda phi: monkeypatch.setitem(PHIS, phi.name, phi))
    path = tmp_path / "phi.py"
    path.write_text(text)
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        "extends: digits-class\nsuite: mine\ncompare: []\n"
        "methods: {mine: {method: gd_sine, params: {adapter: {phi: softsign}}}}\n"
    )
    done = cli("plan", suite, "--store", tmp_path, "--plugin", path)
    assert done.code == 0 and "mine" in done.out
    assert "softsign" in PHIS


def test_the_readmes_ten_lines_forget_and_keep_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines, _ = blocks("README.md")
    example = runpy.run_path(str(EXAMPLES / "own_model.py"))
    model, dataset, forgotten, retained = example["example"]()
    sevens, others = Subset(dataset, forgotten), Subset(dataset, retained)
    names = {"model": model, "sevens": sevens, "others": others}
    exec(compile(lines, "README.md", "exec"), names)
    assert len(lines.strip().splitlines()) <= 10
    assert names["accuracy"] == example["accuracy"](names["unlearned"], dataset, forgotten) < 10
    assert example["accuracy"](names["unlearned"], dataset, retained) > 80
    assert example["accuracy"](model, dataset, forgotten) > 70
    assert (tmp_path / "forgotten/statement.json").is_file()


def test_the_readmes_baseline_passes_the_contract(cli, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(blocks("README.md")[1])
    for name in ("capped_ascent", "capped_ascent_sine"):
        done = cli("check", name, "--plugin", path)
        assert done.code == 0 and f"ok  {name}: 16 of 16 checks pass" in done.out, done.out


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_documents_import_from_common_alone(name):
    for text in blocks(name):
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        ours = {node.module for node in nodes if node.module.startswith("stable_forgetting")}
        assert ours <= {"stable_forgetting.common", "stable_forgetting"}


OLD_PLUGIN = """
from common import METHODS, Finetune


@METHODS.register("my_finetune")
class MyFinetune(Finetune):
    \"\"\"Written before the package had a name of its own.\"\"\"
"""


@pytest.mark.parametrize(
    "text",
    [OLD_PLUGIN, "import common.adapters", "from stable_forgetting.common.engine import fit"],
    ids=["old name", "old module", "moved module"],
)
def test_an_old_plugin_is_told_the_new_import(cli, tmp_path, monkeypatch, text):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p or ".").resolve() != ROOT])
    path = tmp_path / "old.py"
    path.write_text(text)
    done = cli("check", "my_finetune", "--plugin", path)
    line = " ".join(done.err.split())
    assert done.code == 2 and done.out == "" and len(done.err.strip().splitlines()) <= 4
    assert "write: from stable_forgetting.common import METHODS, ..." in line
    assert not [m for m in sys.modules if m.endswith("plugin_old")]


@pytest.mark.parametrize("name", suite_names())
def test_the_example_is_a_row_of_every_built_in_suite(name, loaded_example, built_in, tmp_path):
    """A baseline of one's own enters on equal terms: same tuning, same budget, no further line."""
    file = find_suite(name)
    if file.stem != name:
        pytest.skip("a variant of a suite that is tried")
    path = tmp_path / "mine.yaml"
    rows = {"down_to_chance": None, "down_to_chance_sine": None}
    path.write_text(yaml.safe_dump({"extends": name, "suite": "mine", "methods": rows}))
    suite, parent = load_suite(str(path)), built_in(name)
    row = suite.row("down_to_chance")
    tuned = [r for r in parent.rows if r.search is not None]
    assert (row.search is not None) == bool(parent.spec.tune)
    if row.search is not None and "forget_weight" in row.search.space:
        assert len({draw.config.forget_weight for draw in row.draws}) > 1
    assert not tuned or len(row.draws) == len(tuned[0].draws)
    plan = make_plan(suite, StageStore(tmp_path))
    named = {result.label for result in plan.results} | set(plan.waiting)
    assert {"down_to_chance", "down_to_chance_sine"} <= named | set(plan.inapplicable)
