"""Reports that come with the project, for a reader who has run nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from stable_forgetting.benchmarks.report.files import reading
from stable_forgetting.benchmarks.report.section import Column, Kind, Section, Table
from stable_forgetting.common.base.config import validate

RESULTS = Path(__file__).parents[1] / "results"
_CELLS = re.compile(r"(?<!\\)\|")
"""Borders of a pipe table's cells."""
_HEAD = re.compile(r"`([^`]+)` (.*)", re.DOTALL)
_MARK = re.compile(r"([^\w\s`]) (.*)", re.DOTALL)
"""What begins the explanation of a column, and of a mark."""


class _Shape(BaseModel):
    """The fields that are read of what has more of them."""

    model_config = ConfigDict(strict=True)


class _Distance(_Shape):
    title: str = ""
    unit: str = ""


class _Mean(_Shape):
    mean: float
    low: float | None = None


class _Row(_Shape):
    row: str
    method: str
    seeds: list[int]
    derived: dict[str, Any]
    ag_per_seed: dict[str, float]


class _Attacked(_Shape):
    label: str
    before: float
    attack: str
    after: _Mean


class _Board(_Shape):
    suite: str
    version: int
    distance: _Distance
    floor: _Mean | None = None
    pooled_floor: _Mean | None = None
    rows: list[_Row]
    after_attack: list[_Attacked] | None = None


def shipped_report(name: str) -> Path | None:
    """The Markdown of a suite's shipped report; None where there is none."""
    files = (RESULTS / name / "LEADERBOARD.md", RESULTS / "maps" / name / "MAP.md")
    return next((file for file in files if file.is_file()), None)


def read_board(folder: Path) -> dict[str, Any]:
    """A folder's ``leaderboard.json``.

    Raises:
        DataError: There is none, or it is no leaderboard.
    """
    path = folder / "leaderboard.json"
    with reading(f"{path}: no leaderboard that can be read"):
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        validate(_Board, data, "fields")
    return data


def recorded_seconds(name: str, store: Path) -> float | None:
    """What a suite's trainings took together, trials included; of a store's report, else shipped.

    None where neither says it.  Loading, scoring and tuning's Retrain are not in it.
    """
    for root in (store / "suites", RESULTS):
        try:
            rows = json.loads((root / name / "leaderboard.json").read_text("utf-8"))["rows"]
            spent = [
                float(row["cost"]["seconds"]) * (len(row["seeds"]) + row["trials"])
                for row in rows
                if "seconds" in (row["cost"] or {})
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if spent:
            return math.fsum(spent)
    return None


def read_report(text: str) -> list[Section]:
    """A report's Markdown as the sections that it was written from, without pictures."""
    found: list[Section] = []
    for section in (s for block in text.split("\n\n") for s in _sections(block.strip("\n"))):
        last = found[-1].content if found else None
        own = section.text[0] if section.text else ""
        explained = _explained(last, own) if own and isinstance(last, Table) else None
        if explained:
            found[-1] = replace(found[-1], content=explained)
        else:
            found.append(section)
    return found


def _explained(content: Table, text: str) -> Table | None:
    """The table with what a paragraph says of its columns and marks; None where it says another."""
    docs: dict[str, str] = {}
    notes: dict[str, str] = {}
    into, last = docs, ""
    for part in text.removesuffix(".").split("; "):
        head, mark = _HEAD.match(part), _MARK.match(part)
        if head and head[1] in content.heads:
            into, last = docs, head[1]
            docs[last] = head[2]
        elif mark:
            into, last = notes, mark[1]
            notes[last] = mark[2]
        elif last:
            into[last] += f"; {part}"
    columns = tuple(replace(c, doc=docs.pop(c.head, "")) for c in content.columns)
    explained = replace(content, columns=columns, notes=notes)
    return explained if explained.explanation == text else None


def _sections(block: str) -> Iterator[Section]:
    heading = re.match(r"(#+) (.*)", block)
    if heading:
        yield Section(heading[2], depth=len(heading[1]))
    elif block.startswith("|"):
        yield Section(content=_table(block.splitlines()))
    elif block.startswith("- "):
        yield Section(lines=tuple(line.removeprefix("- ") for line in block.splitlines()))
    elif block and not block.startswith("!["):
        yield Section(text=(" ".join(block.splitlines()),))


def _table(lines: list[str]) -> Table:
    heads, rules, *rows = [
        tuple(cell.strip().replace("\\|", "|") for cell in _CELLS.split(line.strip())[1:-1])
        for line in lines
    ]

    def kind(rule: str) -> Kind:
        return "number" if rule.endswith(":") else "label"

    columns = tuple(Column(head, kind(rule)) for head, rule in zip(heads, rules, strict=True))
    return Table(columns, tuple(rows))
