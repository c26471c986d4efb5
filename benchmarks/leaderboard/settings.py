"""What every row ran with: what tuning chose, and what was fixed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard, info_of
from stable_forgetting.benchmarks.report.cells import MISSING, setting, settings
from stable_forgetting.benchmarks.report.columns import DOCS
from stable_forgetting.benchmarks.report.section import (
    Column,
    Detail,
    Section,
    filled,
    table,
)
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.train.tracking import flat

SHORT = {
    "epochs": "counts passes over the part that defines the row's length",
    "steps": "counts optimizer steps, where they set the length",
    "batch_size": "counts the samples of a step",
    "lr": "is the peak learning rate as written; `lr_scaling` may divide what is applied",
    "forget_weight": "is the weight of the forget term",
    "adapter.rank": "is the rank of the adapter",
    "adapter.omega": "is the factor inside its activation",
}
"""Settings with a column of their own, where a row has them -> what the column shows."""
_ADDRESSES = {
    r"(https?://[^\s<>\"']+)": "{}",
    r"arXiv[:\s]?(\d{4}\.\d{4,5})": "https://arxiv.org/abs/{}",
    r"\b(10\.\d{4,9}/\S+)": "https://doi.org/{}",
}
"""What a source may name -> its address."""
CHOSEN = Column("chosen by tuning", "words", DOCS["chosen by tuning"])
FURTHER = Column("further settings", "words", "holds what else is not the same in every row")


def first_records(board: Leaderboard) -> dict[str, RunRecord]:
    """Label -> a record of the row; all of its seeds have the same settings."""
    records: dict[str, RunRecord] = {}
    for label, record in board.records:
        records.setdefault(label, record)
    return records


def settings_sections(board: Leaderboard) -> list[Section]:
    """A table of rows, and what is the same in all of them; nothing without settings."""
    rows = {label: flat(record.params) for label, record in first_records(board).items()}
    rows = {label: {k: v for k, v in own.items() if v != "{}"} for label, own in rows.items()}
    rows = {label: own for label, own in rows.items() if own}
    if not rows:
        return []
    same = _same(list(rows.values()))
    short = [name for name in SHORT if any(name in own for own in rows.values())]
    chosen = {row.label: row.chosen for row in board.rows}
    lines, brief = [], []
    for label, own in rows.items():
        further = {k: v for k, v in own.items() if not {k} & {*short, *same, *chosen[label]}}
        cells = [label, *(setting(own[k]) if k in own else MISSING for k in short)]
        brief.append(cells)
        lines.append([*cells, settings(chosen[label]) or MISSING, settings(further) or MISSING])
    heads: list[str | Column] = ["method", *(Column(name, doc=SHORT[name]) for name in short)]
    content = table([*heads, CHOSEN, FURTHER], lines, brief=table(heads, brief))
    text = f"The same in every row that has it: {settings(same)}." if same else ""
    return filled(Section("Settings", content=content), Section(text=(text,), level="full"))


def details_section(board: Leaderboard) -> Section:
    """Per row: where the method comes from, the command, the whole config."""
    seeds = board.suite.spec.seeds
    items = [
        row_detail(board.suite.name, label, record.method, record.params, seeds)
        for label, record in first_records(board).items()
    ]
    return Section(content=items, level="full")


def row_detail(
    suite: str, label: str, method: str, params: Mapping[str, Any] | None, seeds: Sequence[int]
) -> Detail:
    """All about a row; ``params`` None where they are not known."""
    info = info_of(method)
    numbers = ",".join(map(str, seeds))
    lines = [
        f"unlearn run {shlex.quote(suite)} --only {shlex.quote(label)} --seeds {numbers}",
        f"unlearn show {method}",
    ]
    if params is not None:
        lines += ["", yaml.safe_dump({"method": method, "params": dict(params)}, sort_keys=False)]
    links = ((info.paper, address(info.paper)),) if info and info.paper != "-" else ()
    return Detail(place_of(label), label, "\n".join(lines), links)


def place_of(label: str) -> str:
    """Where a page has a row's details."""
    return "row-" + re.sub(r"[^\w.=-]+", "-", label)


def address(source: str) -> str:
    """Where a source can be read, if its text names an address, an arXiv number or a DOI."""
    for pattern, form in _ADDRESSES.items():
        if match := re.search(pattern, source):
            return form.format(match[1].rstrip(").,;"))
    return ""


def _same(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that never differ, of those that two rows or more have."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {
        name: own[0]
        for name, own in values.items()
        if name not in SHORT and (len(own) > 1 or len(rows) == 1) and own.count(own[0]) == len(own)
    }
