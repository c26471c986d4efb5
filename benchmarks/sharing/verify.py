"""Recomputes a bundle's table from its scores, and says which cells differ."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.leaderboard.board import FinalRecords, Leaderboard, Trial
from stable_forgetting.benchmarks.leaderboard.data import to_json
from stable_forgetting.benchmarks.leaderboard.derive import compared
from stable_forgetting.benchmarks.leaderboard.judge import add_ranks
from stable_forgetting.benchmarks.leaderboard.write import RECORDS
from stable_forgetting.benchmarks.report.cells import MISSING
from stable_forgetting.benchmarks.report.files import reading
from stable_forgetting.benchmarks.report.section import Column, Section, filled, table
from stable_forgetting.benchmarks.sharing.bundle import MANIFEST, PROBED, TABLE, opened, scores_file
from stable_forgetting.benchmarks.sharing.records import Entry, board_of, read_records
from stable_forgetting.benchmarks.suite.remembered import FILE
from stable_forgetting.benchmarks.suite.suite import Suite
from stable_forgetting.common.base.config import read_yaml, validate
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.scores import Scores, load_scores
from stable_forgetting.common.protocol.benchmark import Benchmark, Runtime
from stable_forgetting.common.protocol.probe import ProbeTable
from stable_forgetting.common.store.records import RunRecord, clean_metrics
from stable_forgetting.common.train.tracking import flat

RELATIVE, ABSOLUTE = 1e-6, 1e-6
"""By how much a number may differ: processors round otherwise."""
RECOMPUTED = (
    "seeds",
    "diverged",
    "metrics",
    "gaps",
    "derived",
    "parts",
    "ag_per_seed",
    "rank",
    "verdict",
)
"""Parts of a row of the table that follow from scores."""


@dataclass(frozen=True)
class Cell:
    """A number of the bundle that is not the recomputed one."""

    row: str
    name: str
    stated: Any
    recomputed: Any


@dataclass(frozen=True)
class Verification:
    """What recomputing showed.

    Attributes:
        digest: What the bundle calls its suite by.
        models: Models whose metrics were made again from their scores.
        cells: Numbers that were compared.
        notes: What a reader must know of the rest.
    """

    board: Leaderboard
    digest: str
    models: int
    cells: int
    different: tuple[Cell, ...]
    notes: tuple[str, ...]


def verify_bundle(path: Path) -> Verification:
    """Checks schema and hashes, then makes every metric and the table again.

    Raises:
        DataError: It is no bundle, or damaged.
        ConfigError: Its benchmark is not here.
    """
    with opened(path) as folder:
        return _verify(folder, path)


def _verify(folder: Path, path: Path) -> Verification:
    entries = read_records(folder / RECORDS)
    spec = _spec(folder, entries)
    stated = board_of(entries, folder / RECORDS, spec)
    suite = stated.suite
    benchmark: Benchmark = BENCHMARKS[spec.benchmark](suite.protocol, Runtime(device="cpu"))

    @functools.cache
    def scores(label: str, replicate: int, seed: int) -> dict[str, Scores]:
        record = by_place[label, replicate, seed].record
        return load_scores(folder / scores_file(record))

    by_place = {entry.place: entry for entry in entries}
    finals: FinalRecords = {}
    again, probed = [], _probes(folder, stated)
    with reading(f"{path}: its scores cannot be measured"):
        for entry in entries:
            own = scores(*entry.place) if entry.record.status == "ok" else {}
            record = _measured(entry.record, own, benchmark)
            metrics = record.metrics
            for name, made in probed.get(entry.place, {}).items():
                metrics = suite.probes[name].added(metrics, made)
            record = record.model_copy(update={"metrics": metrics})
            finals.setdefault(entry.place[:2], {})[entry.record.seed] = record
        finals = compared(suite, finals, scores)
    for entry in entries:
        record = finals[entry.place[:2]][entry.record.seed]
        own = scores(*entry.place) if record.status == "ok" else {}
        forget = len(own["forget"]) if "forget" in own else entry.forget
        again.append(replace(entry, record=record, forget=forget))
    board = board_of(again, folder / RECORDS, spec)
    with reading(NO_TABLE):
        theirs = json.loads((folder / TABLE).read_text("utf-8"))
    if (trials := _trials(theirs)) and not board.rule.goals:
        add_ranks(board.rows, trials)
    pairs = [*_record_cells(entries, again), *_table_cells(theirs, board)]
    pairs += _samples(again, scores)
    return Verification(
        board,
        json.loads((folder / MANIFEST).read_text("utf-8"))["digest"],
        sum(entry.record.status == "ok" for entry in entries),
        len(pairs),
        tuple(cell for cell in pairs if not _same(cell.stated, cell.recomputed)),
        tuple(_notes(entries, benchmark)),
    )


def _spec(folder: Path, entries: Sequence[Entry]) -> Suite:
    """The suite of a bundle, for its table alone; of folds the last one's records are there."""
    spec = validate(Suite, read_yaml(folder / FILE), FILE)
    alone: dict[str, Any] = {"after": None, "audits": {}, "tune": None, "folds": None}
    return spec.model_copy(update={**alone, "protocol": entries[0].record.protocol})


def _measured(record: RunRecord, scores: dict[str, Scores], benchmark: Benchmark) -> RunRecord:
    """The record with the metrics of its scores."""
    if record.status != "ok":
        return record.model_copy(update={"metrics": {}})
    try:
        metrics = benchmark.evaluate(scores, trial=False, seed=record.seed)
    except Diverged as error:
        over = {"metrics": {}, "status": "diverged", "status_detail": error.reason}
        return record.model_copy(update=over)
    return record.model_copy(update={"metrics": clean_metrics(metrics)})


def _probes(folder: Path, board: Leaderboard) -> dict[tuple[str, int, int], dict[str, ProbeTable]]:
    """Row, replicate and seed -> probe -> what it measured."""
    tables: dict[tuple[str, int, int], dict[str, ProbeTable]] = {}
    with reading(f"{PROBED}: cannot be read"):
        for made in json.loads((folder / PROBED).read_text("utf-8")):
            if made["probe"] in board.suite.probes:
                place = (made["row"], made["replicate"], made["seed"])
                tables.setdefault(place, {})[made["probe"]] = ProbeTable(made["rows"])
    return tables


# What is compared --------------------------------------------------------------------------------


def _record_cells(stated: Sequence[Entry], again: Sequence[Entry]) -> Iterator[Cell]:
    for old, new in zip(stated, again, strict=True):
        row = f"{old.label}, seed {old.record.seed}"
        yield Cell(row, "status", old.record.status, new.record.status)
        yield Cell(row, "forget samples", old.forget, new.forget)
        for name in {**old.record.metrics, **new.record.metrics}:
            yield Cell(row, name, old.record.metrics.get(name), new.record.metrics.get(name))


NO_TABLE = f"{TABLE}: cannot be read"


def _trials(stated: Any) -> list[Trial]:
    """The trials of tuning, which widen the intervals of ranks; a gap of None is infinite."""
    with reading(NO_TABLE):
        return [
            Trial(row["row"], {}, math.inf if row["gap"] is None else float(row["gap"]), False)
            for row in (stated.get("tuning") or {"sweep": ()})["sweep"]
        ]


def _table_cells(stated: Any, board: Leaderboard) -> Iterator[Cell]:
    with reading(NO_TABLE):
        theirs = {row["row"]: row for row in stated["rows"] if row["seeds"]}
        floor = _numbered(stated["floor"] or {})
        settings = {label: flat(own) for label, own in stated["settings"].items()}
        chosen = {label: flat(row["chosen"]) for label, row in theirs.items()}
    made = to_json(board)
    ours = {row["row"]: row for row in made["rows"]}
    yield Cell("table", "order of rows", [*theirs], [*ours])
    for label in {**theirs, **ours}:
        yield from _differences(
            label,
            {name: theirs.get(label, {}).get(name) for name in RECOMPUTED},
            {name: ours.get(label, {}).get(name) for name in RECOMPUTED},
        )
    yield from _differences("noise floor", floor, _numbered(made["floor"] or {}))
    for label, own in made["settings"].items():
        yield from _differences(label, settings.get(label, {}), own)
        values = flat(own)
        for name, value in chosen.get(label, {}).items():
            yield Cell(label, f"chosen {name}", value, values.get(name))


def _numbered(floor: Mapping[str, Any]) -> dict[str, Any]:
    """Each seed's floor as a number of its own."""
    return {**floor, "per_seed": {str(n): v for n, v in enumerate(floor.get("per_seed", ()))}}


def _differences(row: str, stated: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Cell]:
    theirs, own = flat(stated), flat(ours)
    yield from (Cell(row, name, theirs.get(name), own.get(name)) for name in {**theirs, **own})


def _samples(entries: Sequence[Entry], scores: Any) -> Iterator[Cell]:
    """Rows of a seed must be scored on the same samples."""
    first: dict[tuple[int, str], str] = {}
    for entry in entries:
        for part, own in scores(*entry.place).items() if entry.record.status == "ok" else ():
            digest = hashlib.sha256(own.indices.tobytes()).hexdigest()[:12]
            row = f"{entry.label}, seed {entry.record.seed}"
            expected = first.setdefault((entry.record.seed, part), digest)
            yield Cell(row, f"samples of {part}", digest, expected)


def _same(stated: Any, recomputed: Any) -> bool:
    if isinstance(stated, int | float) and isinstance(recomputed, int | float):
        return math.isclose(stated, recomputed, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(stated == recomputed)


def _notes(entries: Sequence[Entry], benchmark: Benchmark) -> Iterator[str]:
    versions = {entry.record.benchmark_version for entry in entries}
    if versions != {benchmark.versions.measure}:
        numbers = ", ".join(map(str, sorted(versions)))
        yield f"Measured by version {numbers} of the metrics; here is {benchmark.versions.measure}."
    yield "Taken as stated: tuning, audits, costs, logs, and that the models gave these scores."


def sections(verification: Verification) -> list[Section]:
    """What was recomputed, and every cell that differs."""
    board, different = verification.board, verification.different
    text = (
        f"Hashes of all files are right. Metrics of {verification.models} models made again from "
        f"their scores; {verification.cells} numbers compared, {len(different)} differ."
    )
    rows = [[c.row, c.name, _text(c.stated), _text(c.recomputed)] for c in different]
    heads: list[str | Column] = [
        "row",
        Column("what", "words"),
        Column("stated", "words"),
        Column("ours", "words"),
    ]
    head = f"{board.suite.name} (v{board.suite.spec.version}, {verification.digest})"
    return filled(
        Section(head, (text,), depth=1),
        *([Section(content=table(heads, rows))] if rows else ()),
        Section(text=verification.notes, tone="muted"),
    )


def _text(value: Any) -> str:
    return MISSING if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
