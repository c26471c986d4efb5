"""A resolved suite as files that load to the same suite, and as a digest."""

from __future__ import annotations

from pathlib import Path

import yaml

from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import suite_names, sweeps
from stable_forgetting.common.base.config import digest
from stable_forgetting.common.base.registry import BENCHMARKS, plugin_code

FILE = "suite.yaml"
DIGITS = 8
UNHASHED = {"suite", "title", "notes", "plugins", "after"}
"""What a suite is called, where it lies and what it runs on, on which no number depends."""


def suite_files(suite: ResolvedSuite) -> dict[str, str]:
    """Name -> YAML text: the suite with its overrides, and those of the requests before it."""
    files: dict[str, str] = {}
    name, this = FILE, suite
    while True:
        spec = (this.unfolded or this.spec).model_dump(mode="json", exclude_unset=True)
        before = f"before-{len(files) + 1}.yaml"
        if this.after is not None and this.spec.after:
            spec["after"] = before
        files[name] = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True)
        if "after" not in spec or this.after is None:
            return files
        name, this = before, this.after


def remembered(name: str, store: Path) -> str:
    """A suite's name, or the file that a run left of it in a store's folder."""
    path = store / "suites" / name / FILE
    built_in = {*suite_names(), *sweeps()}
    return str(path) if path.is_file() and name not in built_in else name


def suite_digest(suite: ResolvedSuite) -> str:
    """What tells two suites of one name and version apart: rows, protocol, seeds, plugins' code."""
    spec = suite.unfolded or suite.spec
    rows = {row.label: [row.method, row.config.identity()] for row in suite.rows}
    content = {
        "spec": {
            **spec.model_dump(mode="json", exclude=UNHASHED | (set() if spec.grid else {"grid"})),
            "benchmark": BENCHMARKS.stored_name(spec.benchmark),
        },
        "protocol": suite.protocol,
        "rows": rows,
        "after": suite_digest(suite.after) if suite.after else None,
    }
    return digest({**content, "plugin_code": plugin_code(content)})[:DIGITS]
