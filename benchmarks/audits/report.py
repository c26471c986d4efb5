"""An audit report as tables for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.audits.derive import AuditTable, Cell
from benchmarks.report.table import markdown_table
from benchmarks.spec.resolve import ResolvedSuite
from common.audits import AUDITS
from common.audits.measure import NOT_APPLICABLE, Measure
from common.base.config import canonical
from common.store.stages import StageStore


def number(value: float | None) -> str:
    """Three significant digits; a dash where undefined."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shown(measure: Measure | None) -> str:
    """``value [low, high]``; a star where there is a note."""
    if measure is None:
        return ""
    star = "*" if measure.note else ""
    if measure.low is None or measure.high is None:
        return number(measure.value) + star
    return f"{number(measure.value)} [{number(measure.low)}, {number(measure.high)}]{star}"


def table_rows(table: AuditTable) -> tuple[list[str], list[list[str]], list[str]]:
    """(heads, rows, lines below) of an audit's table."""
    columns = table.columns
    found = {
        label: {column: table.summary(label, column) for column in columns} for label in table.rows
    }
    rows = [[label, *_cells(table, label, row)] for label, row in found.items()]
    intervals = dict.fromkeys(
        m.interval for row in found.values() for m in row.values() if m and m.low is not None
    )
    info = table.audit.info
    head = f"{info.unit}; ideal: {info.ideal}; intervals: {', '.join(intervals) or 'none'}"
    return ["row", *columns], rows, [*([head] if columns else ()), *_notes(table, found)]


def _cells(table: AuditTable, label: str, row: Mapping[str, Measure | None]) -> list[str]:
    """A row's cells; ``n/a`` in all of them where the audit has no meaning for it."""
    reasons = [cell for cell in table.rows[label].values() if isinstance(cell, str)]
    if reasons and all(reason.startswith(NOT_APPLICABLE) for reason in reasons):
        return [shown(measure) or "n/a" for measure in row.values()]
    return [shown(measure) for measure in row.values()]


def summary(table: AuditTable) -> str:
    """What an audit measures, in a line."""
    return AUDITS.entry(table.name).summary


def to_markdown(tables: Sequence[AuditTable], level: str = "###") -> str:
    """Every audit under a heading of its own."""
    blocks = []
    for table in tables:
        heads, rows, lines = table_rows(table)
        blocks.append(f"{level} {table.name}: {summary(table)}")
        blocks += [markdown_table(heads, rows)] if len(heads) > 1 else []
        blocks.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(block for block in blocks if block)


def pieces(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[tuple[list[str], list[list[str]]]]:
    """A table as one or more that fit a width of characters, each with the first column."""
    widths = [max(map(len, column)) + 3 for column in zip(heads, *rows, strict=True)]
    chosen: list[int] = []
    for place in range(1, len(heads)):
        if chosen and widths[0] + sum(widths[k] for k in chosen) + widths[place] > width:
            yield _columns(heads, rows, [0, *chosen])
            chosen = []
        chosen.append(place)
    yield _columns(heads, rows, [0, *chosen])


def _columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], places: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    return [heads[k] for k in places], [[row[k] for k in places] for row in rows]


def _notes(table: AuditTable, found: Mapping[str, Mapping[str, Measure | None]]) -> Iterator[str]:
    """Every note once, with the columns and rows that it belongs to."""
    places: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for label, row in found.items():
        for column, measure in row.items():
            if measure is not None and measure.note:
                columns, labels = places.setdefault(f"* {measure.note}", ({}, {}))
                columns[column], labels[label] = None, None
    for label, cells in table.rows.items():
        for reason in dict.fromkeys(cell for cell in cells.values() if isinstance(cell, str)):
            places.setdefault(reason, ({}, {}))[1][label] = None
    for text, (columns, labels) in places.items():
        rows = "" if len(labels) == len(table.rows) else f" ({', '.join(labels)})"
        where = f": {', '.join(columns)}" if columns else ""
        yield f"{text}{where}{rows}"


def report_json(suite: str, tables: Sequence[AuditTable]) -> dict[str, Any]:
    """The whole report of one suite."""
    return {"schema": "audit-1", "suite": suite, "audits": to_json(tables)}


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


def report_path(store: Path, suite: str) -> Path:
    """Where a suite's audits are written."""
    return store / "suites" / suite / "audits.json"


def print_audits(console: Any, tables: Sequence[AuditTable]) -> None:
    """Every audit: what it measures, its table, how to read it."""
    from benchmarks.audits.report import pieces, summary, table_rows
    from benchmarks.report.table import rich_table

    for table in tables:
        heads, rows, lines = table_rows(table)
        console.print(f"[bold]{table.name}[/bold]: {summary(table)}", highlight=False)
        if len(heads) > 1:
            for piece in pieces(heads, rows, console.width):
                console.print(rich_table(None, *piece))
        for line in lines:
            console.print(line, style="dim", highlight=False, markup=False)
        console.print()


def audit_tables(suite: ResolvedSuite, store: StageStore) -> list[AuditTable]:
    """The tables of the suite's own audits, as far as the store can answer."""
    if not suite.audits:
        return []
    from benchmarks.audits.derive import AuditReport
    from benchmarks.audits.plan import AuditPlanner

    return AuditReport(AuditPlanner(suite, store), suite.audits).tables()
