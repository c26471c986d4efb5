"""Holds the full suites against the settings of their sources.

``python -m tools.sources`` reads ``sources.csv``: for some rows of some suites a setting, its value
in the source, and the file and line where the source says so.  Each difference is printed with
its reason.  The exit code is 1 if a difference has no reason, or a reason has no difference.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.benchmarks.suite.suite import suite_names
from stable_forgetting.common.base.config import canonical

TABLE = Path(__file__).with_suffix(".csv")
load = cache(load_suite)


def settings(suite: ResolvedSuite, pattern: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, settings) of each place that a pattern names: ``protocol``, or rows."""
    if pattern == "protocol":
        yield pattern, canonical(suite.protocol)
        return
    for row in suite.rows:
        if any(fnmatchcase(row.label, word) for word in pattern.split()):
            yield row.label, canonical(row.config)


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted path; None where a part of the path is missing."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def compare(line: Mapping[str, str]) -> list[dict[str, Any]]:
    """What each place of one line of the table has, beside the source's value.

    Raises:
        ValueError: If the line's patterns name no suite or no row.
    """
    wanted = yaml.safe_load(line["value"])
    names = [name for name in suite_names() if fnmatchcase(name, line["suites"])]
    found = [
        {**line, "suite": name, "row": row, "ours": lookup(config, line["key"]), "theirs": wanted}
        for name in names
        for row, config in settings(load(name), line["rows"])
    ]
    if not found:
        raise ValueError(f"no row is called {line['rows']} in a suite {line['suites']}")
    return found


def report(table: Path = TABLE) -> tuple[list[str], int]:
    """The lines to print, and how many of them want a mend."""
    printed, wrong = [], 0
    with table.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        found = compare(line)
        differ = [each for each in found if each["ours"] != each["theirs"]]
        if differ and line["reason"]:
            printed.append(f"{describe(line, differ)}: {line['reason']}")
        elif differ or line["reason"]:
            wrong += 1
            mend = "needs a reason" if differ else "needs no reason"
            printed.append(f"error: {describe(line, differ)}: {mend}")
    places = len({line["source"] for line in lines})
    printed.append(f"{len(lines)} settings from {places} places: {wrong} unexplained")
    return printed, wrong


def describe(line: Mapping[str, str], differ: list[dict[str, Any]]) -> str:
    """One line of the table, and what ours is where it differs."""
    ours = sorted({repr(each["ours"]) for each in differ}) or ["the same"]
    theirs = f"{line['value']} in {line['source']}"
    return f"{line['suites']} {line['rows']} {line['key']}: {theirs}, ours {' or '.join(ours)}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    text, unexplained = report()
    sys.stdout.write("\n".join(text) + "\n")
    sys.exit(bool(unexplained))
