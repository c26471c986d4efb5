"""Every column of leaderboards, sweeps, attacks: ``unlearn show metrics``, docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stable_forgetting.benchmarks.report.columns import BOARD_DOCS, NAMED_DOCS, SWEEP_DOCS
from stable_forgetting.benchmarks.report.section import Section, Table, table
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.audits.columns import COLUMNS
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.rules import GapRule
from stable_forgetting.common.protocol.probe import PROBES, make_probe

GOALS = {"target": "Retrain's value", "higher": "higher", "lower": "lower"}
READING = (
    "A good row is like Retrain, the model that never saw the forgotten data. So the goal of most "
    "columns (→) is Retrain's value, not 0 or 100. ↑ and ↓ mark the others.",
    "A second Retrain differs from the first by chance alone. Its value is the floor of a → "
    "column. Reports print it as a row and as the noise floor under the table.",
    "A collapsed model gives one answer to everything. A good value that it reaches too is no "
    "evidence alone.",
    "Which columns tell models that know the forget set from models that never saw it, and what "
    "rounding and relearning do to them, is measured in benchmarks/results/cards/CARDS.md. What is "
    "forgotten orders rows by columns that pass there. One does not: AG4 keeps MIA on classes, as "
    "the field does, and every report on classes says how its rows stand without it. No cards were "
    "measured for WMDP and RWKU.",
)

SIMULATED = ((5, "0", "0", "98"), (10, "0", "9", "100"))
"""Seeds -> percent of 16 rows: called different and indistinguishable if they are Retrains, and
called different if they lie three standard deviations aside; see test_verdict_rates.py."""
CHOSEN = ("6", "11")
"""Percent of equal rows that a test finds different, least and most, where seeds decide whether it
is paired and rows do not vary together; see test_verdict_rates.py."""
VERDICT_HEADS = (
    "seeds of the table",
    "a Retrain is called different, %",
    "a Retrain is called indistinguishable, %",
    "a far row is called different, %",
)
VERDICTS = (
    "Marks take five seeds: with fewer a table has p-values alone. `different`: an exact test, "
    "corrected for the rows of a table. `indistinguishable`: the averages and the answers of each "
    "sample lie within twice the distance between two Retrains, by sign tests that are corrected "
    "for the rows. `undecided`: neither is shown.",
    "Two rows are compared by a t-test that is always paired by seed. Between equal rows with "
    "normal noise it finds a difference in 5 % of the cases, whether or not pairing removes noise. "
    "A test that is paired only where the rows vary together finds one in "
    f"{' to '.join(CHOSEN)} % of the cases where they do not (simulated, 3 to 10 seeds). Where the "
    "differences of all seeds are equal, their spread is not known, and p is that of the sign "
    "test, 2^(1 - seeds).",
    "What the marks find in a simulated table of 16 rows that share their two Retrains:",
)
AUDITED = (
    "Every attack is shown beside the same attack on a second Retrain, its floor. "
    "{part} is a part of the data, such as forget or test, {n} a number."
)


def glossary() -> list[Section]:
    """Sections: how to read a table, the metrics of every benchmark, and all other columns."""
    sections = [Section("What the columns mean", READING, depth=1)]
    for entry in BENCHMARKS:
        cls = BENCHMARKS[entry.name]
        sections.append(Section(f"Benchmark {entry.name}", _rule(cls.gap), _metrics(cls.metrics)))
    for entry in PROBES:
        if any(field.is_required() for field in PROBES[entry.name].Config.model_fields.values()):
            continue
        probe = make_probe(entry.name, {}, "metrics")
        if all(spec.collapsed and spec.silent for spec in probe.metrics):
            text = f"{entry.summary}; a suite has it under probes: {{{entry.name}: }}."
            sections.append(Section(f"Probe {entry.name}", (text,), _metrics(probe.metrics)))
    verdicts = table(VERDICT_HEADS, [[str(n), *row] for n, *row in SIMULATED])
    sections.append(Section("Verdicts", VERDICTS, verdicts))
    for title, docs in (
        ("Other columns of leaderboards", BOARD_DOCS),
        ("Columns of sweeps", {**SWEEP_DOCS, **NAMED_DOCS}),
    ):
        rows = [[*line] for line in docs.items()]
        sections.append(Section(title, content=table(["column", "what it is"], rows, words=True)))
    return [*sections, _audits()]


def sections_of(name: str) -> list[Section]:
    """What is known of a column, by its head or its key; nothing where none is called so.

    Case does not matter.
    """
    found = [section for entry in BENCHMARKS for section in _distances(entry.name, name)]
    for section in glossary():
        if isinstance(section.content, Table):
            rows = tuple(row for row in section.content.rows if _is_called(row, name))
            if rows:
                found.append(Section(section.title, content=replace(section.content, rows=rows)))
    return found


def _distances(benchmark: str, name: str) -> list[Section]:
    """The distance of a benchmark, one of its axes or what else its rule derives."""
    rule = BENCHMARKS[benchmark].gap
    title, wanted = f"Benchmark {benchmark}", name.lower()
    if not isinstance(rule, GapRule):
        return [Section(title, _rule(rule))] if getattr(rule, "title", "").lower() == wanted else []
    if wanted in {rule.title.lower(), *(axis.title.lower() for axis in rule.axes)}:
        return [Section(title, (rule.words,))]
    return [
        Section(title, (f"{column.title} {column.doc}.",))
        for column in rule.also
        if column.title.strip(" ↑↓→").lower() == wanted
    ]


def _is_called(row: Sequence[str], name: str) -> bool:
    """Whether a line of a table is of a column: its head without the arrow, or its key."""
    return name.lower() in (row[0].strip(" ↑↓→").lower(), *(cell.lower() for cell in row[1:2]))


def _metrics(specs: Sequence[MetricSpec]) -> Table:
    heads = ["column", "key", "what it is", "unit", "goal", "a collapsed model has"]
    rows = []
    for spec in specs:
        unit, goal = spec.unit or "none", GOALS[spec.better]
        head = f"{spec.title} {spec.arrow[0]}"
        rows.append([head, spec.name, spec.doc, unit, goal, spec.collapsed, spec.silent])
    return table([*heads, "it says nothing"], rows, words=True)


def _audits() -> Section:
    rows = []
    for entry in AUDITS:
        info = AUDITS[entry.name].info
        columns = [f"{head}: {doc}" for head, doc in COLUMNS[entry.name].items()]
        rows.append([entry.name, entry.summary, info.unit, info.ideal, "; ".join(columns)])
    heads = ["attack", "what it is", "unit", "ideal", "its columns"]
    return Section("Columns of attacks", (AUDITED,), table(heads, rows, words=True))


def _rule(rule: object) -> tuple[str, ...]:
    """How the benchmark's rows are ordered."""
    if not isinstance(rule, GapRule):
        title = getattr(rule, "title", "")
        return (f"{title}: rows are ordered by goals, which the report states.",)
    derived = [f"{column.title} {column.doc}." for column in rule.also]
    return (" ".join([rule.words, *derived]),)
