"""Every column is explained: beside its table, as a tooltip, and in docs/metrics.md.

``python -m tests.benchmarks.test_glossary`` writes the document anew.
"""

from __future__ import annotations

import html as escaping
import re
from pathlib import Path

import pytest

from stable_forgetting import benchmarks
from stable_forgetting.benchmarks.audits.derive import AuditReport
from stable_forgetting.benchmarks.audits.plan import AuditPlanner
from stable_forgetting.benchmarks.audits.report import sections as audit_sections
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.tables import SOME_DIVERGED
from stable_forgetting.benchmarks.machine.glossary import glossary
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.report.columns import DOCS
from stable_forgetting.benchmarks.report.section import Table, table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_report
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.audits import AUDITS, make_audit
from stable_forgetting.common.audits.columns import COLUMNS, column_doc
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.store.stages import StageStore

DOCUMENT = Path(benchmarks.__file__).resolve().parents[1] / "docs" / "metrics.md"


def test_the_document_says_what_the_code_declares():
    assert DOCUMENT.read_text(encoding="utf-8") == markdown.write(glossary())


@pytest.mark.parametrize("name", BENCHMARKS.names())
def test_every_metric_says_what_it_is_and_what_it_cannot_say(name):
    text = DOCUMENT.read_text(encoding="utf-8")
    for spec in BENCHMARKS[name].metrics:
        assert spec.doc and spec.collapsed and spec.silent, spec.name
        assert f"| {spec.title} {spec.arrow[0]} | {spec.name} | " in text


def test_every_column_of_a_leaderboard_is_explained(filled):
    board = make_leaderboard(load_suite(str(filled.paths["class"])), StageStore(filled.store))
    contents = [s.content for s in sections(board) if isinstance(s.content, Table)]
    tables = [*contents, *(content.narrow for content in contents if content.narrow)]
    assert len(tables) > 5
    for each in tables:
        for column in each.columns[1:]:
            assert column.doc or not column.head, column.head
            assert not column.head or f"`{column.head}` {column.doc}" in each.explanation
    page = html.write(sections(board))
    titles = [escaping.unescape(text) for text in re.findall(r' title="([^"]*)"', page)]
    assert "FA → is accuracy on the forget set (training images)" in titles
    assert f"n {SOME_DIVERGED if any(row.diverged for row in board.rows) else DOCS['n']}" in titles


def test_every_column_of_a_sweep_is_in_the_document():
    text = DOCUMENT.read_text(encoding="utf-8")
    for path in (RESULTS / "maps").glob("*/MAP.md"):
        heads = [
            head
            for section in read_report(path.read_text(encoding="utf-8"))
            if isinstance(section.content, Table) and section.content.heads[0] == "method"
            for head in section.content.heads[1:]
        ]
        assert len(heads) > 10
        for head in heads:
            assert f"| {head} | " in text or re.fullmatch(r"[\d.e-]+", head), head


def test_every_column_of_an_audit_is_explained_and_in_the_document(filled):
    text = DOCUMENT.read_text(encoding="utf-8")
    assert set(COLUMNS) == set(AUDITS.names())
    for name, columns in COLUMNS.items():
        assert f"| {name} | {AUDITS.entry(name).summary.replace('|', chr(92) + '|')} | " in text
        assert all(f"{head}: {doc}" in text for head, doc in columns.items())
        heads = [head.format(n=8, part="test_forget", metric="MIA") for head in columns]
        assert [column_doc(name, head) for head in heads] == [*columns.values()]
    planner = AuditPlanner(load_suite(str(filled.paths["class"])), StageStore(filled.store))
    free = {name: make_audit(name, {}, "test") for name in ("js", "disagreement", "ks", "c2st")}
    tables = AuditReport(planner.suite, planner.store, free, planner.report_plan(free)).tables()
    contents = [section.content for section in audit_sections(tables)]
    columns = [column for content in contents if content for column in content.columns[1:]]
    assert len(columns) > 6 and all(column.doc for column in columns)
    assert column_doc("js", "a new one, of a plugin") == column_doc("mine", "forget") == ""


def test_a_plain_head_is_explained_where_it_is_known():
    known, unknown = table(["method", "n", "x"], [["a", "1", "2"]]).columns[1:]
    assert known.doc == DOCS["n"] and unknown.doc == ""


if __name__ == "__main__":
    DOCUMENT.write_text(markdown.write(glossary()), encoding="utf-8")
