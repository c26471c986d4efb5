"""Shows a report that comes with the project where the store has no records."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stable_forgetting.benchmarks.cli.options import console, error_console
from stable_forgetting.benchmarks.report import html, tex
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.benchmarks.report.shipped import read_board, read_report, shipped_report
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.reading import suite_version
from stable_forgetting.benchmarks.suite.suite import suite_names
from stable_forgetting.common.base.errors import ConfigError

MADE = {"html": html.write, "tex": tex.write}
"""Formats that are made of a shipped report's Markdown."""
WITHDRAWN = "its suite has changed since: it compares no methods until the suite is run again"


def show_shipped(name: str, missing: str, *, under: str = "") -> None:
    """Prints the head of a shipped report, or what is under one of its headings.

    Args:
        name: Of the suite.
        missing: What the store lacks, and the command that makes it.
        under: Heading; the report's own when empty.

    Raises:
        ConfigError: ``missing``, where nothing is shipped.
    """
    file = shipped_report(name)
    chosen = _part(read_report(file.read_text("utf-8")), under) if file else []
    if file is None or not chosen:
        raise ConfigError(missing)
    _say(missing, f"{file} comes with the project; from it:")
    if name in suite_names() and read_board(file.parent)["version"] != suite_version(name):
        _say("", WITHDRAWN)
    show(console, chosen)


def write_shipped(name: str, missing: str, form: str) -> None:
    """Writes a shipped report in a format to the terminal.

    Raises:
        ConfigError: ``missing``, where nothing is shipped in this format.
    """
    file = shipped_report(name)
    if file is not None and form not in ("md", *MADE):
        file = file.with_name(f"leaderboard.{form}")
    if file is None or not file.is_file():
        raise ConfigError(missing)
    _say(missing, f"{file} comes with the project")
    text = file.read_text("utf-8")
    sys.stdout.write(MADE[form](read_report(text)) if form in MADE else text)


def _say(missing: str, instead: str) -> None:
    text = "; ".join(filter(None, (missing.partition(";")[0], instead)))
    error_console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def _part(sections: Sequence[Section], under: str) -> list[Section]:
    """The sections before the first further heading, or those below one."""
    heads = [place for place, section in enumerate(sections) if section.title]
    first = next((p for p in heads if sections[p].title == under or not under), None)
    if first is None:
        return []
    depth = sections[first].depth if under else 2
    end = next((p for p in heads if p > first and sections[p].depth <= depth), len(sections))
    return list(sections[first:end])
