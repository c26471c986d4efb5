"""The names that ``from common import ...`` offers, and what old imports of them become."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

PUBLIC = {
    "METHODS": "common.base.registry",
    "BENCHMARKS": "common.base.registry",
    "PROBLEMS": "common.base.registry",
    "AUDITS": "common.audits",
    "PHIS": "common.bounded.phi",
    "PRESETS": "common.bounded.presets",
    "Strict": "common.base.config",
    "UserError": "common.base.errors",
    "ConfigError": "common.base.errors",
    "DataError": "common.base.errors",
    "AccessError": "common.base.errors",
    "Diverged": "common.base.errors",
    "MethodInfo": "common.methods.base",
    "UnlearningMethod": "common.methods.base",
    "resolve_config": "common.methods.base",
    "UnlearnTask": "common.methods.task",
    "AdaptedConfig": "common.methods.gradient",
    "AdaptedMethod": "common.methods.gradient",
    "GradientConfig": "common.methods.gradient",
    "GradientMethod": "common.methods.gradient",
    "ForgetConfig": "common.methods.forget_retain",
    "RetainConfig": "common.methods.forget_retain",
    "ForgetRetainMethod": "common.methods.forget_retain",
    "Finetune": "common.methods.simple",
    "Objective": "common.objectives.objectives",
    "ObjectiveValue": "common.objectives.objectives",
    "CrossEntropy": "common.objectives.objectives",
    "ForgetRetain": "common.objectives.objectives",
    "gradient_difference": "common.objectives.objectives",
    "Term": "common.objectives.terms",
    "Mean": "common.objectives.terms",
    "cross_entropy": "common.objectives.positions",
    "unlikelihood": "common.objectives.positions",
    "Batch": "common.data.batch",
    "Source": "common.data.batch",
    "Loader": "common.data.loader",
    "ForgetSplit": "common.data.splits",
    "FitConfig": "common.train.config",
    "fit": "common.train.fit",
    "AdapterConfig": "common.bounded.config",
    "Phi": "common.bounded.phi",
    "attach": "common.bounded.attach",
    "detach": "common.bounded.attach",
    "adapted_layers": "common.bounded.layer",
    "save_adapter": "common.bounded.files",
    "load_adapter": "common.bounded.files",
    "Scores": "common.measure.scores",
    "MetricSpec": "common.measure.metric",
    "ConstantGoal": "common.measure.goal",
    "MeasuredGoal": "common.measure.goal",
    "RetrainGoal": "common.measure.goal",
    "GapRule": "common.measure.rules",
    "Criterion": "common.measure.rules",
    "GoalRule": "common.measure.rules",
    "RuleSet": "common.measure.rules",
    "Benchmark": "common.protocol.benchmark",
    "Versions": "common.protocol.benchmark",
    "Part": "common.data.parts",
    "Role": "common.data.parts",
    "PARTS": "common.data.parts",
    "PROBES": "common.protocol.probe",
    "Probe": "common.protocol.probe",
    "ProbeTable": "common.protocol.probe",
    "Audit": "common.audits.base",
    "AuditInfo": "common.audits.base",
    "check_method": "common.checks",
}
"""Public name -> the module that it comes from."""
RENAMED = {"GradientDifference": "gradient_difference", "Terms": "ObjectiveValue"}
"""Names of objectives as they were before there was a public surface -> the public name."""
PACKAGES = ("common", "vision", "language")


def stale_imports(text: str) -> str | None:
    """What a plugin imports from places that are no more, and what to write; None if nothing.

    Imports inside functions count too: they would fail in the middle of a run.

    Args:
        text: Python source.

    Raises:
        SyntaxError: It is none.
    """
    imports = sorted(set(_imports(ast.parse(text))))
    gone = [(module, name) for module, name in imports if not _is_there(module, name)]
    if not gone:
        return None
    names = {RENAMED.get(name, name) for _, name in imports}
    offered = sorted(names & PUBLIC.keys()) or ["METHODS", "..."]
    renamed = [f"{RENAMED[name]} for {name}" for _, name in gone if name in RENAMED]
    module, name = gone[0]
    hint = f" ({', '.join(renamed)})" if renamed else ""
    return f"{module}.{name} has moved; write: from common import {', '.join(offered)}{hint}"


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that is imported from the packages, at any depth."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, str]] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name.rpartition(".") for alias in node.names]
            pairs = [(parent, name) for parent, _, name in modules]
        yield from (pair for pair in pairs if pair[0].partition(".")[0] in PACKAGES)


def _is_there(module: str, name: str) -> bool:
    """Whether the import will succeed; a module that is a file is not looked into."""
    spec = _spec(module)
    if spec is None:
        return False
    if spec.submodule_search_locations is None or name == "*":
        return True
    return _spec(f"{module}.{name}") is not None or hasattr(import_module(module), name)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except ModuleNotFoundError:
        return None
