"""Every column of every table, explained: ``unlearn show metrics`` and docs/metrics.md."""

from __future__ import annotations

from benchmarks.report.columns import DOCS
from benchmarks.report.section import Section, table
from common.base.registry import BENCHMARKS
from common.measure.metric import MetricSpec
from common.measure.rules import GapRule

GOALS = {"target": "Retrain's value", "higher": "higher", "lower": "lower"}
READING = (
    "A row is good where it is like Retrain, the model that never saw the forgotten data. So the "
    "goal of most columns (→) is Retrain's value, not 0 or 100; ↑ and ↓ mark the others.",
    "The floor of every → column is what a second Retrain scores: the first differs from it by "
    "chance alone. Reports print it as a row and as the noise floor under the table.",
    "A collapsed model gives one answer to everything. What it does well on is no evidence alone.",
)


def glossary() -> list[Section]:
    """Sections: how to read a table, the metrics of every benchmark, and the other columns."""
    sections = [Section("What the columns mean", READING, depth=1)]
    for entry in BENCHMARKS:
        cls = BENCHMARKS[entry.name]
        rows = [_row(spec) for spec in cls.metrics]
        heads = ["column", "key", "what it is", "unit", "goal", "a collapsed model has"]
        content = table([*heads, "it says nothing"], rows, words=True)
        sections.append(Section(f"Benchmark {entry.name}", _rule(cls.gap), content))
    others = [[head, doc] for head, doc in DOCS.items()]
    sections.append(
        Section("Other columns", content=table(["column", "what it is"], others, words=True))
    )
    return sections


def _row(spec: MetricSpec) -> list[str]:
    unit, goal = spec.unit or "none", GOALS[spec.better]
    head = f"{spec.title} {spec.arrow[0]}"
    return [head, spec.name, spec.doc, unit, goal, spec.collapsed, spec.silent]


def _rule(rule: object) -> tuple[str, ...]:
    """How the benchmark's rows are ordered."""
    if not isinstance(rule, GapRule):
        return (
            f"{getattr(rule, 'title', '')}: rows are ordered by goals, which the report states.",
        )
    derived = [f"{column.title} {column.doc}." for column in rule.also]
    return (" ".join([rule.words, *derived]),)
