"""The rules that keep the packages apart and the start fast, read from the source itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "vision", "language", "benchmarks")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PACKAGE_MAY_IMPORT = {
    "common": {"common"},
    "vision": {"common", "vision"},
    "language": {"common", "language"},
    "benchmarks": set(PACKAGES),
}
PENDING = {
    ("common.methods.tools", "common.methods"),  # tools take the task from below the methods
}
"""Imports from one room to another that still stand and shall go."""

MAY_IMPORT = {
    "common": "base data bounded objectives train measure protocol methods audits checks",
    "common.base": "",
    "common.data": "base",
    "common.bounded": "base",
    "common.objectives": "data",
    "common.train": "base data bounded objectives",
    "common.measure": "base data",
    "common.membership": "base data measure",
    "common.store": "base",
    "common.protocol": "base data bounded train measure",
    "common.methods.tools": "base data bounded objectives train",
    "common.methods": "base data bounded objectives train protocol methods.tools",
    "common.audits": "base data objectives train measure protocol",
    "common.probes": "base measure protocol",
    "common.checks": "base data bounded train measure protocol methods",
    "vision": "common.base common.protocol",
    "vision.config": "common.base",
    "vision.data": "common.base common.data config",
    "vision.models": "common.base common.bounded common.data common.measure common.store "
    "common.protocol config",
    "vision.metrics": "common.base common.measure common.membership",
    "vision.scenarios": "common.base common.data config data",
    "vision.methods": "common.base common.data common.objectives common.train common.methods data "
    "models",
    "vision.stand_in": "common.protocol config models",
    "vision.tiny": "common.base common.train common.checks config data models",
    "vision.apply": "common.base common.data common.measure common.membership common.store "
    "common.protocol config data models",
    "vision.benchmark": "common.base common.bounded common.data common.train common.measure "
    "common.protocol config data models metrics scenarios stand_in",
    "language": "common.base common.protocol",
    "language.config": "common.base",
    "language.stand_in": "common.base common.protocol config data models",
    "language.data": "common.base common.data config",
    "language.models": "common.base common.bounded common.data common.measure common.protocol "
    "config",
    "language.metrics": "common.base common.measure config",
    "language.measure": "common.base common.measure config data models metrics",
    "language.scenarios": "common.base common.data config data",
    "language.methods": "common.base common.bounded common.data common.objectives common.train "
    "common.methods common.methods.tools models",
    "language.apply": "common.base common.data common.measure common.store common.protocol config "
    "data models metrics measure",
    "language.tiny": "common.base common.data common.train common.checks config data models",
    "language.benchmark": "common.base common.bounded common.data common.train common.measure "
    "common.protocol config data models measure stand_in",
    "language.probes": "common.base common.measure common.protocol config data metrics measure "
    "benchmark apply",
    "language.benchmarks": "common.base common.bounded common.data common.train common.measure "
    "common.protocol config data models metrics measure scenarios benchmark",
    "benchmarks": "vision language",
    "benchmarks.__main__": "cli",
    "benchmarks.report": "common.base common.measure",
    "benchmarks.suite": "common.base common.train common.measure common.protocol common.methods "
    "common.audits",
    "benchmarks.pipeline": "benchmarks common.base common.bounded common.data common.train "
    "common.measure common.store common.protocol common.methods suite",
    "benchmarks.audits": "common.base common.bounded common.measure common.store common.audits "
    "report suite pipeline",
    "benchmarks.leaderboard": "common.base common.train common.measure common.store "
    "common.protocol report suite pipeline audits paper",
    "benchmarks.sharing": "common.base common.measure common.store common.protocol common.train "
    "report suite pipeline leaderboard",
    "benchmarks.maps": "common.base common.bounded common.data common.train common.measure "
    "common.store common.protocol common.methods common.audits report suite pipeline audits",
    "benchmarks.rehearsal": "common.base common.train common.protocol common.store report suite "
    "pipeline audits leaderboard",
    "benchmarks.apply": "common.base common.bounded common.data common.train common.measure "
    "common.store common.protocol common.methods common.audits vision.apply report pipeline",
    "benchmarks.costs": "common.base common.train common.protocol language.models vision.config "
    "vision.models report suite",
    "benchmarks.paper": "common.base report suite costs",
    "benchmarks.machine": "common.base common.measure common.audits common.store common.protocol "
    "language.measure language.metrics paper report suite",
    "benchmarks.faults": "common.base common.data common.store report cli",
    "benchmarks.theory": "common.base common.bounded common.measure common.train vision.config "
    "vision.models report",
    "benchmarks.perf": "common.base common.bounded common.data common.objectives common.train "
    "common.measure common.membership common.store language.config language.data language.measure "
    "language.metrics language.models vision.config vision.data vision.models report",
    "benchmarks.gpu": "common.base common.bounded common.store language.data language.models "
    "vision.models report faults perf",
    "benchmarks.cli": "benchmarks common.base common.bounded common.train common.store "
    "common.protocol "
    "common.audits common.checks language.probes report suite pipeline audits leaderboard maps "
    "apply costs machine paper rehearsal sharing",
}
"""Room -> what it may import, at module level, in functions and for types.

A room is a folder, or a module at the root of a package.  Names are those of the same package, or
whole ones; a room may always import itself.
"""
HEAVY = ("torch", "timm", "transformers", "sklearn", "accelerate", "optuna", "lm_eval", "datasets")
LIGHT = (
    "benchmarks",
    "benchmarks.audits.plan",
    "benchmarks.audits.derive",
    "benchmarks.pipeline.planner",
    "benchmarks.cli.map",
    "benchmarks.maps.draw",
    "benchmarks.costs.model",
    "benchmarks.sharing.versus",
    "benchmarks.suite.suite",
    "common.audits.boundary",
    "common.audits.challenge",
    "common.audits.recovery",
    "common.audits.relearning",
    "common.audits.representations",
    "common.methods.simple",
    "common.measure.gaps",
    "common.measure.verdict",
    "common.store.records",
    "language.measure.evaluation",
    "language.data.fictitious",
    "language.benchmark",
    "language.scenarios",
    "language.benchmarks.tofu",
    "language.data.chunks",
    "language.models.families",
    "language.probes.lm_eval",
    "language.probes.reasoning",
    "language.probes.original",
    "language.probes.dialogue",
    "language.probes.perplexity",
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
    found = [f"imports {top}" for top in sorted(tops & set(PACKAGES) - PACKAGE_MAY_IMPORT[package])]
    if "accelerate" in tops and not path.startswith("common/train/"):
        found.append("imports accelerate")
    mentions = any("torch.utils.tensorboard" in text for text in [*names, *strings(tree)])
    if mentions and path != "common/train/tracking.py":
        found.append("mentions torch.utils.tensorboard")
    found += [f"imports {top}" for top in sorted(tops & UNPICKLERS)]
    calls = _unsafe_calls(tree)
    if path == CONVERTER and "weights_only=True" in source:
        calls.remove("calls torch.load")  # one call, which reads tensors alone
    return found + calls


CONVERTER = "common/store/pickled.py"


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
        (
            "common/x.py",
            "def f():\n    from stable_forgetting.language import text",
            "imports language",
        ),
        (
            "common/checks/x.py",
            "from stable_forgetting.benchmarks.pipeline.planner import Stage",
            "imports benchmarks",
        ),
        ("vision/methods/x.py", "import language", "imports language"),
        (
            "language/x.py",
            "from stable_forgetting.vision.data.source import ImageSource",
            "imports vision",
        ),
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
        (CONVERTER, "import torch\nx = torch.load('f', weights_only=False)", "calls torch.load"),
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
    assert loaded_by("benchmarks.suite.samplers", "scipy.stats.qmc", "optuna") == ["optuna"]


# Sizes ------------------------------------------------------------------------------------------

LIMITS: dict[type[ast.AST], int] = {
    ast.Module: 350,
    ast.ClassDef: 250,
    ast.FunctionDef: 60,
    ast.AsyncFunctionDef: 60,
}
"""Kind of node -> its most lines, docstring and signature included, decorators not."""


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_classes_and_functions_are_short(path):
    assert oversized(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("head", "limit", "name"), [("def f():", 60, "f"), ("class A:", 250, "A"), ("", 350, "module")]
)
def test_what_is_too_long_is_seen(head, limit, name):
    line = "    x = 1\n" if head else "x = 1\n"
    longest = f"{head}\n" + line * (limit - 1)
    assert oversized(longest) == []
    assert oversized(longest + line) == [f"{name}: {limit + 1} lines"]


# Rooms and circles ------------------------------------------------------------------------------

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def room_of(module: str) -> str:
    """The folder of a module, or the module itself at the root of a package."""
    parts = MODULES[module].relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2] if len(parts) == 2 else parts[:-1]).removesuffix(".__init__")


def may_import(room: str) -> set[str]:
    """The whole names of a row of the table, with what is pending."""
    package = room.split(".")[0]
    names = {
        name if name.split(".")[0] in PACKAGES else f"{package}.{name}"
        for name in MAY_IMPORT[room].split()
    }
    return names | {room} | {target for source, target in PENDING if source == room}


def for_types_only(tree: ast.AST) -> set[int]:
    """Ids of the nodes below ``if TYPE_CHECKING``."""
    blocks = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    return {id(inner) for body in blocks for node in body for inner in ast.walk(node)}


def imported_modules(module: str, *, types: bool) -> set[str]:
    """Own modules that a module imports; with ``types`` those for type checkers too."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    left_out = set() if types else for_types_only(tree)
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in whole}
    return names & MODULES.keys() - {module}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Nodes of one circle, in order; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph[node]):
            if found := visit(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_every_room_is_in_the_table():
    assert {room_of(module) for module in MODULES} == set(MAY_IMPORT)
    assert {name for room in MAY_IMPORT for name in may_import(room)} <= set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    breaches = {
        (module, target)
        for module in MODULES
        if room_of(module) == room
        for target in imported_modules(module, types=True)
        if room_of(target) not in may_import(room)
    }
    assert breaches == set()


def test_what_is_pending_still_stands():
    edges = {
        (room_of(module), room_of(target))
        for module in MODULES
        for target in imported_modules(module, types=True)
    }
    assert edges >= PENDING


def test_the_table_has_no_circle():
    pending = {
        room: {target for source, target in PENDING if source == room} for room in MAY_IMPORT
    }
    assert circle({room: may_import(room) - {room} - pending[room] for room in MAY_IMPORT}) == []


def test_no_circle_of_files():
    assert circle({module: imported_modules(module, types=False) for module in MODULES}) == []


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
