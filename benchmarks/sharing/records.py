"""Record files -> the table that follows from them, wherever they were measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.derive import derive
from stable_forgetting.benchmarks.leaderboard.write import RECORDS
from stable_forgetting.benchmarks.report.files import reading
from stable_forgetting.benchmarks.suite.goals import make_probes, with_columns
from stable_forgetting.benchmarks.suite.remembered import DIGITS
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import Suite
from stable_forgetting.common.base.config import Strict, validate
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.protocol.probe import PROBES
from stable_forgetting.common.store.records import RunRecord


@dataclass(frozen=True)
class Entry:
    """One line of a record file.

    Attributes:
        forget: Samples in the forget set; None in files that do not say it.
    """

    suite: str
    label: str
    forget: int | None
    record: RunRecord

    @property
    def place(self) -> tuple[str, int, int]:
        """Row label, replicate and seed."""
        return self.label, self.record.replicate, self.record.seed


def read_records(path: Path) -> list[Entry]:
    """The records of one suite.

    Args:
        path: A file of records, or a folder with one.

    Raises:
        DataError: There is none, or it is not one suite's, or of several versions.
    """
    file = _file(path)
    if not file.is_file():
        raise DataError(f"{file}: no such file; give the {RECORDS} of a run, or its folder")
    with reading(f"{file}: no file of records"):
        lines = file.read_text("utf-8").splitlines()
    entries = [_entry(line, f"{file}: line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise DataError(f"{file}: holds no record")
    first = entries[0]
    seen: set[tuple[str, int, int]] = set()
    methods: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        if entry.suite != first.suite or entry.record.protocol != first.record.protocol:
            raise DataError(
                f"{file}: line {number}: of another suite or protocol than line 1 "
                f"({entry.suite}, {first.suite}); keep one suite a file"
            )
        record, version = entry.record, first.record.benchmark_version
        if record.benchmark_version != version:
            raise DataError(
                f"{file}: line {number}: measured by version {record.benchmark_version} of the "
                f"metrics, line 1 by version {version}; keep one version a file"
            )
        version = methods.setdefault(entry.label, record.method_version)
        if record.method_version != version:
            raise DataError(
                f"{file}: line {number}: {entry.label} of version {record.method_version} of its "
                f"method, and before of version {version}; keep one version a file"
            )
        if entry.place in seen:
            raise DataError(f"{file}: line {number}: {entry.label} has this seed already")
        seen.add(entry.place)
    return entries


def _file(path: Path) -> Path:
    return path / RECORDS if path.is_dir() else path


def _entry(line: str, where: str) -> Entry:
    with reading(f"{where}: no record of a row"):
        content: dict[str, Any] = json.loads(line)
        suite, label = content.pop("suite"), content.pop("row")
        forget = content.pop("forget", None)
        record = RunRecord.model_validate(content)
        if not (isinstance(suite, str) and isinstance(label, str)) or record.trial:
            raise ValueError("suite, row or trial")
        return Entry(suite, label, None if forget is None else int(forget), record)


def board_of(entries: Sequence[Entry], origin: Path, spec: Suite | None = None) -> Leaderboard:
    """The table of records.

    Args:
        origin: Their file, for errors and for what tells the table apart.
        spec: The suite's own; made of the records where it is absent.

    Raises:
        DataError: They are of several data sets.
        ConfigError: A benchmark that is not here, or records that make no table.
    """
    suite = _suite(entries, str(origin), spec or _spec(entries, str(origin)))
    sizes = {e.record.seed: e.forget for e in entries if e.forget is not None}
    records = [(entry.label, entry.record) for entry in entries]
    return derive(suite, records, sizes, digest=file_digest(_file(origin))[:DIGITS])


def _spec(entries: Sequence[Entry], origin: str) -> Suite:
    first = entries[0].record
    rows = {e.label: {"method": e.record.method, "params": e.record.params} for e in entries}
    dotted = {name for e in entries for name in e.record.metrics if "." in name}
    probed = {name.partition(".")[0] for name in dotted}
    content = {
        "suite": entries[0].suite,
        "title": f"From the records in {Path(origin).name}",
        "benchmark": first.benchmark,
        "protocol": first.protocol,
        "seeds": sorted({entry.record.seed for entry in entries}),
        "retrains": 1 + max(entry.record.replicate for entry in entries),
        "methods": rows,
        "probes": {name: None for name in sorted(probed) if name in PROBES},
    }
    return validate(Suite, content, origin)


def _suite(entries: Sequence[Entry], origin: str, spec: Suite) -> ResolvedSuite:
    """A suite for its table alone: its rows need no method that is here, and nothing is run."""
    protocol = validate(BENCHMARKS[spec.benchmark].Config, spec.protocol, f"{origin}: protocol")
    probes = make_probes(spec, origin)
    spec = with_columns(spec, protocol, probes, origin)
    methods = {entry.label: entry.record.method for entry in entries}
    rows = tuple(ResolvedRow(label, method, Strict()) for label, method in methods.items())
    return ResolvedSuite(spec, protocol, rows, probes=probes)
