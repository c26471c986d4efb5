"""Published tables and what in them does not follow -> sections."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any

from stable_forgetting.benchmarks.report.cells import MISSING, number
from stable_forgetting.benchmarks.report.section import Level, Section, Table, table
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.suite.goals import (
    TOLERANCE,
    PublishedRow,
    read_printed,
    read_tables,
    recomputed_gap,
)
from stable_forgetting.common.base.config import check_known

MEANT = {
    "forget_quality": "forget_quality as printed lies on the grid of LoKU's scripts (fq_reference:"
    " loku): at most 300 rows of the forget set against the first 300 of forget10 under the model"
    " retrained without forget10. A suite compares all rows with its own Retrain, unless its"
    " evaluation says fq_reference: loku."
}
"""Metric of published tables -> what a reader must know beside a measured one."""
FINDINGS = RESULTS / "paper/findings.csv"
HEADS = ("table", "row", "metric", "printed", "recomputed", "rule")


def read_findings() -> list[dict[str, str]]:
    """Printed numbers that do not follow from others; ``python -m tools.paper`` finds them."""
    with FINDINGS.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def finding_section() -> Section:
    """All findings as one table."""
    findings, count = read_findings(), len(read_printed())
    title = f"The paper's numbers against themselves: {len(findings)} findings in {count:,} numbers"
    return Section(title, content=_findings(findings))


def published_sections(labels: Sequence[str], level: Level = "compact") -> list[Section]:
    """Per published table a section, and one of what in it does not follow from itself.

    They stand beside measured tables, never in them.
    """
    sections = []
    for label, rows, findings in _published(labels):
        sections.append(_section(label, rows, level))
        if findings:
            title = f"{label}: {len(findings)} published numbers do not follow"
            sections.append(Section(title, content=_findings(findings), level=level))
    return sections


def published_json(labels: Sequence[str]) -> list[dict[str, Any]]:
    """The same as plain numbers: nothing here was measured."""
    return [
        {
            "table": label,
            "kind": "published",
            "rows": [{"row": row.method, "values": row.values} for row in rows],
            "findings": findings,
        }
        for label, rows, findings in _published(labels)
    ]


def _published(labels: Sequence[str]) -> list[tuple[str, list[PublishedRow], list[dict[str, str]]]]:
    tables = read_tables() if labels else {}
    every = read_findings() if labels else []
    check_known("no published table", labels, [*tables])
    return [(label, tables[label], [f for f in every if f["table"] == label]) for label in labels]


def _findings(findings: Sequence[Mapping[str, str]]) -> Table:
    return table([*HEADS], [[*finding.values()] for finding in findings], words=True)


def _section(label: str, published: Sequence[PublishedRow], level: Level) -> Section:
    metrics = list(dict.fromkeys(name for row in published for name in row.values))
    reference = next((row for row in published if row.method == "Retrain"), None)
    rows = []
    for row in published:
        cells = [row.method, *[_printed(row.values.get(name)) for name in metrics]]
        if reference is not None:
            gap, printed = recomputed_gap(row, reference), row.values.get("AG")
            differs = gap is not None and printed is not None and abs(gap - printed[0]) > TOLERANCE
            cells += [number(gap, 2), "differs from print" if differs else ""]
        rows.append(cells)
    heads = ["published", *metrics, *(["AG recomputed", ""] if reference is not None else ())]
    title = f"{label} (published; not comparable with the measured table)"
    texts = tuple(MEANT[name] for name in metrics if name in MEANT)
    return Section(title, texts, table(heads, rows), level=level)


def _printed(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return MISSING
    mean, std = value
    return f"{mean:g}" if std is None else f"{mean:g}±{std:g}"
