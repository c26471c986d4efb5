"""What no linter sees; who may import whom is in setup.cfg, what is banned in pyproject.toml."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "vision", "language", "benchmarks")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TRACKING, CONVERTER = "common/train/tracking.py", "common/store/pickled.py"
UNSAFE = ("trust_remote_code", "allow_pickle")
"""Arguments that run code which came with a file, unless they are False."""
LIMITS: dict[type[ast.AST], int] = {
    ast.Module: 350,
    ast.ClassDef: 250,
    ast.FunctionDef: 60,
    ast.AsyncFunctionDef: 60,
}
"""Kind of node -> its most lines, docstring and signature included, decorators not."""


def breaches(source: str, path: str) -> Iterator[str]:
    """Which rules a file at ``path`` (relative to the root) breaks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and "torch.utils.tensorboard" in str(node.value):
            if path != TRACKING:
                yield "mentions torch.utils.tensorboard"
        elif isinstance(node, ast.Call):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
            yield from (f"sets {name}" for name in UNSAFE if given.get(name, "False") != "False")
            loads = ast.unparse(node.func) == "torch.load"
            if path == CONVERTER and loads and given.get("weights_only") != "True":
                yield "unpickles"


def oversized(source: str) -> list[str]:
    """What of a file is longer than it may be, each with its lines."""
    tree = ast.parse(source)
    sizes: list[tuple[ast.AST, str, int]] = [(tree, "module", len(source.splitlines()))]
    sizes += [
        (node, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return [f"{name}: {lines} lines" for node, name, lines in sizes if lines > LIMITS[type(node)]]


def test_the_packages_are_found():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


def test_every_file_keeps_the_rules_and_is_short():
    found = {}
    for path in FILES:
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        found[name] = [*breaches(source, name), *oversized(source)]
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("path", "source", "breach"),
    [
        ("vision/x.py", "m = import_module('torch.utils.tensorboard')", "mentions"),
        (CONVERTER, "import torch\nx = torch.load('f', weights_only=False)", "unpickles"),
        (CONVERTER, "import torch\nx = torch.load('f')", "unpickles"),
        ("language/x.py", "f('m', trust_remote_code=True)", "sets trust_remote_code"),
        ("language/x.py", "f('m', trust_remote_code=flag)", "sets trust_remote_code"),
        ("common/x.py", "np.load('f', allow_pickle=True)", "sets allow_pickle"),
    ],
)
def test_a_breach_is_seen(path, source, breach):
    assert any(found.startswith(breach) for found in breaches(source, path))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (TRACKING, "m = import_module('torch.utils.tensorboard')"),
        (CONVERTER, "import torch\nx = torch.load('f', weights_only=True)"),
        ("language/x.py", "f('m', trust_remote_code=False)"),
    ],
)
def test_what_is_allowed_is_not_called_a_breach(path, source):
    assert list(breaches(source, path)) == []


@pytest.mark.parametrize(
    ("head", "limit", "name"), [("def f():", 60, "f"), ("class A:", 250, "A"), ("", 350, "module")]
)
def test_what_is_too_long_is_seen(head, limit, name):
    line = "    x = 1\n" if head else "x = 1\n"
    longest = f"{head}\n" + line * (limit - 1)
    assert oversized(longest) == []
    assert oversized(longest + line) == [f"{name}: {limit + 1} lines"]


@pytest.mark.slow
def test_the_wheel_is_one_package_below_two_megabytes(tmp_path):
    left_out = shutil.ignore_patterns(".*", "tests", "build", "runs", "*.egg-info", "__pycache__")
    tree = shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=left_out)
    how = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, tree)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *how], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 2_000_000
    with zipfile.ZipFile(wheel) as held:
        tops = {name.partition("/")[0] for name in held.namelist()}
        held.extractall(tmp_path / "installed")
    assert {top for top in tops if not top.endswith(".dist-info")} == {"stable_forgetting"}
    start = "from stable_forgetting.benchmarks.cli.main import main; main()"
    asked = (
        ["report", "digits-class", "--format", "svg"],
        ["compare", "--after-attack"],
        ["verify", "paper"],
        ["site", "--out", str(tmp_path / "s")],
    )
    for arguments in asked:  # what is shipped is read without the repository
        call = [sys.executable, "-c", start, *arguments]
        home = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        subprocess.run(call, check=True, cwd=tmp_path, env=home, stdout=subprocess.DEVNULL)
    assert (tmp_path / "s" / "digits-class.csv").is_file()
