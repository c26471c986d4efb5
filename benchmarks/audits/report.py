"""Audits -> sections and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from stable_forgetting.benchmarks.audits.after import Shown, after_attack
from stable_forgetting.benchmarks.audits.derive import AuditReport, AuditTable, Cell
from stable_forgetting.benchmarks.audits.plan import AuditPlan
from stable_forgetting.benchmarks.audits.stored import StoredPlan
from stable_forgetting.benchmarks.report.cells import significant
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.audits.base import NOT_APPLICABLE, Measure
from stable_forgetting.common.audits.columns import column_doc
from stable_forgetting.common.base.config import canonical
from stable_forgetting.common.store.stages import StageStore


def sections(tables: Sequence[AuditTable]) -> list[Section]:
    """A section per audit: its table, and how to read it."""
    return [_section(audited) for audited in tables]


def _section(audited: AuditTable) -> Section:
    columns = audited.columns
    measures = {
        label: {column: audited.summary(label, column) for column in columns}
        for label in audited.rows
    }
    info = audited.audit.info
    intervals = dict.fromkeys(
        m.interval for row in measures.values() for m in row.values() if m and m.low is not None
    )
    reading = f"{info.unit}; ideal: {info.ideal}; intervals: {', '.join(intervals) or 'none'}"
    reading += _extent(audited, measures)
    lines = [*([reading] if columns else ()), *_notes(audited, measures)]
    rows = [[label, *_cells(audited, label, row)] for label, row in measures.items()]
    heads = [Column(column, doc=column_doc(audited.name, column)) for column in columns]
    content = table(["row", *heads], rows) if columns else None
    title = f"{audited.name}: {AUDITS.entry(audited.name).summary}"
    return Section(title, content=content, lines=tuple(lines), depth=3)


def _extent(audited: AuditTable, measures: Mapping[str, Mapping[str, Measure | None]]) -> str:
    """How many units the measures have, and what one model took."""
    counts = sorted({m.n for row in measures.values() for m in row.values() if m and m.n})
    text = f"; n: {' to '.join(dict.fromkeys(map(str, (counts[0], counts[-1]))))}" if counts else ""
    if audited.seconds:
        text += f"; cost: {significant(fmean(audited.seconds))} s a model"
    return text


def measure_cell(measure: Measure | None) -> str:
    """``value [low, high]``; a star where there is a note."""
    if measure is None:
        return ""
    star = "*" if measure.note else ""
    if measure.low is None or measure.high is None:
        return significant(measure.value) + star
    ends = f"[{significant(measure.low)}, {significant(measure.high)}]"
    return f"{significant(measure.value)} {ends}{star}"


def _cells(audited: AuditTable, label: str, row: Mapping[str, Measure | None]) -> list[str]:
    """A row's cells; ``n/a`` in all of them where the audit has no meaning for it."""
    reasons = [cell for cell in audited.rows[label].values() if isinstance(cell, str)]
    if reasons and all(reason.startswith(NOT_APPLICABLE) for reason in reasons):
        return [measure_cell(measure) or "n/a" for measure in row.values()]
    return [measure_cell(measure) for measure in row.values()]


def _notes(
    audited: AuditTable, measures: Mapping[str, Mapping[str, Measure | None]]
) -> Iterator[str]:
    """Every note once, with the columns and rows that it belongs to."""
    places: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for label, row in measures.items():
        for column, measure in row.items():
            if measure is not None and measure.note:
                columns, labels = places.setdefault(f"* {measure.note}", ({}, {}))
                columns[column], labels[label] = None, None
    for label, cells in audited.rows.items():
        for reason in dict.fromkeys(cell for cell in cells.values() if isinstance(cell, str)):
            places.setdefault(reason, ({}, {}))[1][label] = None
    for text, (columns, labels) in places.items():
        rows = "" if len(labels) == len(audited.rows) else f" ({', '.join(labels)})"
        where = f": {', '.join(columns)}" if columns else ""
        yield f"{text}{where}{rows}"


def to_json(tables: Sequence[AuditTable]) -> dict[str, Any]:
    """Every audit, per row and seed, as plain JSON types."""

    def cell(value: Cell) -> Any:
        if isinstance(value, str):
            return {"not_applicable": value}
        return {name: measure.to_json() for name, measure in value.items()}

    return {
        table.name: {
            "version": table.audit.info.version,
            "tier": table.audit.info.tier,
            "unit": table.audit.info.unit,
            "ideal": table.audit.info.ideal,
            "config": canonical(table.audit.config),
            "rows": {
                label: {str(seed): cell(value) for seed, value in cells.items()}
                for label, cells in table.rows.items()
            },
        }
        for table in tables
    }


def audit_tables(
    suite: ResolvedSuite, store: StageStore, plan: StoredPlan
) -> tuple[list[AuditTable], list[Shown]]:
    """The tables of the suite's own attacks, as far as the store can answer, and the worst ones."""
    if not suite.audits:
        return [], []
    report = AuditReport(suite, store, suite.audits, AuditPlan(plan.results, plan.audits))
    tables = report.tables()
    return tables, after_attack(report, tables)
