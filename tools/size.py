"""How large the project is, beside its budgets: ``python -m tools.size [--frames]``.

Only files that git tracks are counted.  ``--frames`` runs a tiny suite in this process and lists
the functions of ours that are on the stack when the adapter computes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "vision", "language", "benchmarks")
EXTRAS = ("apply", "audits", "checks", "sharing", "sweeps")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORT = (ast.Import, ast.ImportFrom)
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
TINY = (
    "run digits-class --only gd_sine --seeds 1 --workers 1 --set retrains=1 --set budget=null "
    "--set defaults.steps=2 --set protocol.minimum_train_accuracy=0 "
    "--set protocol.train.epochs=1 --set protocol.train.warmup_steps=0"
)
"""A run that trains an adapter in this process."""


def tracked(*patterns: str) -> list[Path]:
    """Files of the checkout that git tracks and that are there."""
    names = subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True)
    return [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]


def code_lines(text: str, tree: ast.AST) -> int:
    """Lines that hold code: no blank line, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def late_imports(tree: ast.AST) -> int:
    """Import statements inside a function, or for type checkers alone."""
    late = set()
    for node in ast.walk(tree):
        types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if types or isinstance(node, FUNCTION):
            late |= {inner.lineno for inner in ast.walk(node) if isinstance(inner, IMPORT)}
    return len(late)


def named(nodes: list[ast.expr], *names: str) -> bool:
    """Whether a decorator or a base class is one of ``names``."""
    return any(name in ast.unparse(node) for node in nodes for name in names)


def measure(files: list[Path]) -> dict[str, int]:
    """Counts over Python files; lengths of functions are percentiles."""
    counts = dict.fromkeys(("lines", "code", "classes", "data classes", "configs", "late"), 0)
    lengths = []
    for file in files:
        text = file.read_text("utf-8")
        tree = ast.parse(text)
        counts["lines"] += len(text.splitlines())
        counts["code"] += code_lines(text, tree)
        counts["late"] += late_imports(tree)
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
            elif isinstance(node, ast.ClassDef):
                counts["classes"] += 1
                counts["data classes"] += named(node.decorator_list, "dataclass")
                counts["configs"] += node.name.endswith(("Config", "Spec"))
    lengths.sort()
    shares = {f"p{share}": lengths[len(lengths) * share // 100] for share in (50, 90)}
    return {**counts, "files": len(files), **shares, "longest": lengths[-1]}


def rows() -> Iterator[tuple[str, object, str]]:
    """(what, count, goal) of everything that the source shows."""
    of = {name: tracked(f"{name}/*.py") for name in (*PACKAGES, "tools", "tests")}
    product = list(chain.from_iterable(of[name] for name in PACKAGES))
    core = [file for file in product if not set(EXTRAS) & set(file.relative_to(ROOT).parts)]
    sizes, tools = measure(product), measure(of["tools"])
    yield "product lines", sizes["lines"], "<= 40,000"
    yield "  of them core: no " + ", ".join(EXTRAS), measure(core)["lines"], "<= 31,000"
    yield "  of them code", sizes["code"], "about 24,000"
    for name in PACKAGES:
        yield f"  in {name}", measure(of[name])["lines"], ""
    yield "tools, lines", tools["lines"], "<= 3,000"
    yield "tests, lines", measure(of["tests"])["lines"], "<= 26,000"
    yield "files", sizes["files"], ""
    whole = measure(product + of["tools"])
    yield "classes (tools too)", whole["classes"], "<= 420"
    yield "data classes (tools too)", whole["data classes"], "<= 130"
    yield "classes named Config or Spec", whole["configs"], ""
    yield "late imports (tools too)", whole["late"], "<= 350"
    lengths = " / ".join(str(sizes[key]) for key in ("p50", "p90", "longest"))
    yield "length of functions p50 / p90 / longest", lengths, "7 / 21 / 60"
    yield "suite files", len(tracked(":(glob)benchmarks/suites/*.yaml")), "<= 45"
    commands = sum(file.read_text("utf-8").count("\n@command(") for file in of["benchmarks"])
    yield "commands", commands, "<= 14"


def deepest(arguments: list[str], file: str, name: str) -> list[str]:
    """Our functions on the stack of ``unlearn``'s deepest call of a file's function."""
    from stable_forgetting.benchmarks.cli.main import main

    homes = tuple(str(ROOT / name) for name in PACKAGES)
    stack: list[str] = []

    def look(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call" or frame is None or frame.f_code.co_name != name:
            return
        if not frame.f_code.co_filename.endswith(file):
            return
        names = []
        while frame is not None:
            code, frame = frame.f_code, frame.f_back
            path = str(Path(code.co_filename).resolve())
            if path.startswith(homes) and code.co_flags & inspect.CO_OPTIMIZED:  # a function
                names.append(f"{Path(path).relative_to(ROOT)}:{code.co_name}")
        stack[:] = names[::-1] if len(names) > len(stack) else stack

    sys.argv = ["unlearn", *arguments]
    sys.setprofile(look)
    with contextlib.suppress(SystemExit):
        main()
    sys.setprofile(None)
    return stack


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", action="store_true", help="also run a tiny suite")
    table = list(rows())
    if parser.parse_args().frames:
        with tempfile.TemporaryDirectory() as store:
            stack = deepest([*TINY.split(), "--store", store], "bounded/eager.py", "build_weight")
        sys.stdout.write("\n".join(stack) + "\n")
        table.append(("frames from run to the adapter", len(stack), "<= 22"))
    for what, count, goal in table:
        shown = f"{count:,}" if isinstance(count, int) else str(count)
        sys.stdout.write(f"{what:60} {shown:>12}   {goal}\n")
