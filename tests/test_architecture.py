"""The rules that keep the packages apart and the start fast, read from the source itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "vision", "language", "benchmarks")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAY_IMPORT = {
    "common": {"common"},
    "vision": {"common", "vision"},
    "language": {"common", "language"},
    "benchmarks": set(PACKAGES),
}
HEAVY = ("torch", "timm", "transformers", "sklearn", "accelerate", "optuna")
LIGHT = (
    "benchmarks",
    "benchmarks.audits.plan",
    "benchmarks.audits.derive",
    "benchmarks.pipeline.planner",
    "benchmarks.cli.map",
    "benchmarks.maps.draw",
    "benchmarks.costs.model",
    "benchmarks.spec.suite",
    "common.audits.boundary",
    "common.audits.challenge",
    "common.audits.recovery",
    "common.audits.relearning",
    "common.audits.representations",
    "common.methods.simple",
    "common.measure.gaps",
    "common.store.records",
    "language.measure.evaluation",
    "language.data.fictitious",
    "language.benchmark",
    "language.scenarios",
    "language.config",
    "language.data.tofu",
    "common.methods.fila",
    "common.methods.variants",
    "common.methods.hinge",
    "common.methods.preference",
    "common.methods.reweighted",
    "language.methods.refusals",
    "language.methods.rmu",
    "vision.benchmark",
)
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute dotted names of everything that a file imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            base = package if node.level else module
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def breaches(source: str, path: str) -> list[str]:
    """Which rules a file at ``path`` (relative to the root) breaks."""
    tree = ast.parse(source)
    package = path.split("/")[0]
    names = set(imports(tree, package))
    tops = {name.split(".")[0] for name in names}
    found = [f"imports {top}" for top in sorted(tops & set(PACKAGES) - MAY_IMPORT[package])]
    if "accelerate" in tops and not path.startswith("common/train/"):
        found.append("imports accelerate")
    mentions = any("torch.utils.tensorboard" in text for text in [*names, *strings(tree)])
    if mentions and path != "common/train/tracking.py":
        found.append("mentions torch.utils.tensorboard")
    found += [f"imports {top}" for top in sorted(tops & UNPICKLERS)]
    return found + _unsafe_calls(tree)


def _unsafe_calls(tree: ast.AST) -> list[str]:
    """Calls that unpickle, or that run code which came with a checkpoint."""
    found = []
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
        if alias.name == "load"
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "torch.load" or called in aliases:
            found.append("calls torch.load")
        for keyword in node.keywords:
            refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "trust_remote_code" and not refused:
                found.append("sets trust_remote_code")
            if keyword.arg == "allow_pickle" and not refused:
                found.append("sets allow_pickle")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_keeps_the_rules(path):
    relative = path.relative_to(ROOT).as_posix()
    assert breaches(path.read_text(encoding="utf-8"), relative) == []


def test_the_packages_are_found():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize(
    ("path", "source", "breach"),
    [
        ("common/x.py", "import vision.data.source", "imports vision"),
        ("common/x.py", "def f():\n    from language import text", "imports language"),
        (
            "common/checks/x.py",
            "from benchmarks.pipeline.planner import Stage",
            "imports benchmarks",
        ),
        ("vision/methods/x.py", "import language", "imports language"),
        ("language/x.py", "from vision.data.source import ImageSource", "imports vision"),
        ("language/x.py", "import benchmarks.pipeline.runner as run", "imports benchmarks"),
        ("vision/x.py", "from accelerate import Accelerator", "imports accelerate"),
        ("benchmarks/x.py", "import accelerate.state", "imports accelerate"),
        ("common/x.py", "from torch.utils import tensorboard", "mentions torch.utils.tensorboard"),
        (
            "vision/x.py",
            "m = importlib.import_module('torch.utils.tensorboard')",
            "mentions torch.utils.tensorboard",
        ),
        ("common/x.py", "import pickle", "imports pickle"),
        ("vision/x.py", "from joblib import load", "imports joblib"),
        ("vision/x.py", "import torch\nx = torch.load('f', weights_only=True)", "calls torch.load"),
        ("vision/x.py", "from torch import load as l\nx = l('f')", "calls torch.load"),
        ("language/x.py", "f('m', trust_remote_code=True)", "sets trust_remote_code"),
        ("language/x.py", "f('m', trust_remote_code=flag)", "sets trust_remote_code"),
        ("common/x.py", "np.load('f', allow_pickle=True)", "sets allow_pickle"),
    ],
)
def test_a_breach_is_seen(path, source, breach):
    assert breach in breaches(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("common/train/fit.py", "from accelerate import Accelerator"),
        ("common/train/tracking.py", "from torch.utils.tensorboard import SummaryWriter"),
        ("benchmarks/x.py", "import common, vision.data.source, language.data.source"),
        ("vision/x.py", "from . import data\nfrom common.base.config import Strict"),
        ("language/x.py", "f('m', trust_remote_code=False)"),
    ],
)
def test_what_is_allowed_is_not_called_a_breach(path, source):
    assert breaches(source, path) == []


def loaded_by(*modules: str) -> list[str]:
    """Heavy packages in a fresh interpreter that imported ``modules``."""
    script = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return json.loads(done.stdout)


def test_listing_and_planning_import_nothing_heavy():
    assert loaded_by(*LIGHT) == []


def test_the_import_test_would_see_a_heavy_package():
    assert loaded_by("common.objectives.objectives") == ["torch"]


def test_optuna_brings_nothing_heavy_into_planning():
    assert loaded_by("benchmarks.spec.samplers", "scipy.stats.qmc", "optuna") == ["optuna"]
