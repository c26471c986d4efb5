"""Which suites measure which tables and figures of the paper, and how far that is."""

from __future__ import annotations

from typing import Any

from stable_forgetting.benchmarks.costs.estimate import CARD, estimates, total_hours
from stable_forgetting.benchmarks.paper.rehearsals import is_full, is_rehearsed
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board
from stable_forgetting.benchmarks.suite.goals import read_figures, read_tables
from stable_forgetting.benchmarks.suite.needs import OWN
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import suite_names

NOTE = (
    "measured here: its report is in benchmarks/results. withdrawn: its suite has changed since."
    " small: a suite for a CPU. rehearsed: every"
    " row of the suite as it is now ran its first and last steps on stand-ins (run --rehearse)."
    " Hours and memory"
    f" of the others are derived for one card ({CARD.name}; unlearn plan SUITE): hours of all rows"
    " and seeds in turn, memory of the row that needs most. Suites of one setting share Original"
    " and Retrain."
)


def coverage() -> dict[str, list[str]]:
    """Table or figure, in the order of the published files -> suites, the small ones first."""
    named: dict[str, list[str]] = {label: [] for label in (*read_tables(), *read_figures())}
    for name in sorted(suite_names(), key=lambda name: ("small" not in name, name)):
        suite = read_suite(name)[1]
        for label in (*suite.get("published", ()), *suite.get("figures", ())):
            named[label].append(name)
    return named


def state_of(name: str) -> str:
    """How far a suite is, in a few words."""
    suite = load_suite(name)
    if (RESULTS / name / "leaderboard.json").is_file():
        version = read_board(RESULTS / name)["version"]
        current = version == suite.spec.version
        return "measured here" if current else f"withdrawn: measured here by version {version}"
    if not is_full(suite):
        return "small"
    protocol: Any = suite.protocol
    needs = "needs a GPU" if protocol.model.name in OWN else "needs the hub and a GPU"
    words = [*["rehearsed"] * is_rehearsed(suite), needs]
    lines = estimates(suite)
    if lines:
        most = max(line.memory for line in lines) / 1e9
        words += [f"{total_hours(lines):,.1f} h", f"{most:,.0f} GB"]
    return ", ".join(words)


def coverage_section() -> Section:
    """Every table and figure as lines of one table, a suite each."""
    figures, every = read_figures(), coverage()
    states = {name: state_of(name) for name in {n for names in every.values() for n in names}}
    rows = []
    for label, names in every.items():
        what = ": ".join(filter(None, (label, figures.get(label, {}).get("title"))))
        rows += [["" if k else what, name, states[name]] for k, name in enumerate(names)]
    notes = [f"{label}: {figure['note']}" for label, figure in figures.items() if "note" in figure]
    title = f"The paper: {len(every)} tables and figures, {len(states)} suites"
    content = table(["table or figure", "suite", "state"], rows, words=True)
    return Section(title, (NOTE,), content, tuple(notes))
