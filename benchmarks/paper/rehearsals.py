"""Which suites were rehearsed whole, as they are now.

``benchmarks/results/rehearsals.json`` holds a digest of each: a suite that says something else
since counts as not rehearsed.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.costs.estimate import estimates
from stable_forgetting.benchmarks.report.files import reading
from stable_forgetting.benchmarks.suite.needs import OWN
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.benchmarks.suite.suite import SUITES, suite_names
from stable_forgetting.common.base.config import canonical
from stable_forgetting.common.base.files import json_digest, write_json
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.store.packages import PACKAGE

RECORD = SUITES.parent / "results" / "rehearsals.json"


def is_full(suite: ResolvedSuite) -> bool:
    """Whether a suite's model or its training has a size for a GPU."""
    protocol: Any = suite.protocol
    name = protocol.model.name
    return (name not in OWN and not name.startswith(PACKAGE)) or bool(estimates(suite))


def full_suites() -> list[str]:
    """The built-in ones that are for a GPU."""
    return [name for name in suite_names() if is_full(load_suite(name))]


def digest(suite: ResolvedSuite) -> str:
    """Of protocol, rows and probes, with versions; of its folds and earlier requests, too."""
    name = suite.spec.benchmark
    rows = {
        row.label: [row.method, METHODS[row.method].info.version, row.config.identity()]
        for row in suite.rows
    }
    content = {
        "benchmark": [
            BENCHMARKS.stored_name(name),
            repr(BENCHMARKS[name].versions),
            canonical(suite.protocol),
        ],
        "rows": rows,
        "probes": {name: canonical(entry.probe.config) for name, entry in suite.probes.items()},
        "parents": [digest(each) for each in (*suite.folds, suite.after) if each is not None],
    }
    return json_digest(content)[:20]


def read_rehearsals(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """Suite -> ``digest``, ``date``, ``rows`` and ``cpu_seconds`` of its rehearsal.

    Raises:
        DataError: The file holds something else.
    """
    if not path.exists():
        return {}
    with reading(f"{path}: holds no record of rehearsals", "; name another file"):
        entries: dict[str, dict[str, Any]] = dict(json.loads(path.read_bytes()).items())
    return entries


def is_rehearsed(suite: ResolvedSuite) -> bool:
    """Whether the suite, as it is now, was rehearsed and every row went well."""
    entry = read_rehearsals().get(suite.name)
    return entry is not None and entry["digest"] == digest(suite)


def write_rehearsal(path: Path, suite: ResolvedSuite, seconds: float) -> None:
    """Adds a suite all of whose rows went well, in ``seconds`` of a CPU; or replaces its entry."""
    entry = {
        "digest": digest(suite),
        "date": datetime.date.today().isoformat(),
        "rows": len(suite.rows),
        "cpu_seconds": round(seconds, 1),
    }
    write_json(path, dict(sorted({**read_rehearsals(path), suite.name: entry}.items())))
