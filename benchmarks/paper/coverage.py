"""Which suites measure which tables and figures of the paper, and how far that is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stable_forgetting.benchmarks.costs.estimate import A100, estimates, total_hours
from stable_forgetting.benchmarks.paper.rehearsals import OWN, is_full, is_rehearsed
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.shipped import RESULTS, read_board
from stable_forgetting.benchmarks.suite.goals import read_figures, read_tables
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import suite_names

NOTE = (
    "measured here: its report is in benchmarks/results. withdrawn: its suite has changed since."
    " small: a suite for a CPU. rehearsed: every"
    " row of the suite as it is now ran its first and last steps on stand-ins (run --rehearse)."
    " Hours and memory"
    f" of the others are derived for one card ({A100.name}; unlearn plan SUITE): hours of all rows"
    " and seeds in turn, memory of the row that needs most. Suites of one setting share Original"
    " and Retrain."
)


@dataclass(frozen=True)
class Covered:
    """One table or figure.

    Attributes:
        label: In the paper.
        title: Of a figure.
        suites: That measure it, the small ones first.
        note: What they show in another way.
    """

    label: str
    title: str
    suites: tuple[str, ...]
    note: str


def coverage() -> list[Covered]:
    """Every table and figure, in the order of the published files."""
    named = _named()
    labels: dict[str, Mapping[str, str]] = {label: {} for label in read_tables()}
    labels |= read_figures()
    return [
        Covered(label, figure.get("title", ""), tuple(named[label]), figure.get("note", ""))
        for label, figure in labels.items()
    ]


def _named() -> dict[str, list[str]]:
    """Label -> suites that name it."""
    named: dict[str, list[str]] = defaultdict(list)
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
    rows, every = [], coverage()
    states = {name: state_of(name) for name in {n for c in every for n in c.suites}}
    for covered in every:
        what = covered.label + (f": {covered.title}" if covered.title else "")
        for index, name in enumerate(covered.suites):
            rows.append([what if index == 0 else "", name, states[name]])
    notes = [f"{covered.label}: {covered.note}" for covered in every if covered.note]
    title = f"The paper: {len(every)} tables and figures, {len(states)} suites"
    content = table(["table or figure", "suite", "state"], rows, words=True)
    return Section(title, (NOTE,), content, tuple(notes))
