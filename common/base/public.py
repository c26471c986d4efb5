"""The names that ``from common import ...`` offers, and what old imports of them become."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path


def _offered() -> dict[str, str]:
    source = Path(__file__).parents[1] / "__init__.py"
    imports = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    ]
    return {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }


PUBLIC = _offered()
"""Public name -> the module that it comes from: what ``common/__init__.py`` imports for types."""
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
