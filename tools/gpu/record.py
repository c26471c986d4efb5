"""What an item leaves behind: JSON and Markdown, written anew after every row."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.files import write_json, write_text
from stable_forgetting.common.store.records import environment
from tools.gpu.items import Item, Row

SCHEMA = 1
QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


class Record:
    """The files of one item; whoever is cut off leaves the rows so far."""

    def __init__(self, out: Path, name: str, item: Item, device: str, tiny: bool):
        self._out, self._name, self._item = out, name, item
        self._began = time.monotonic()
        self.rows: list[Row] = []
        self._head: dict[str, Any] = {"schema": SCHEMA, "item": name, "shows": item.shows}
        self._head |= {"command": command_line(), "device": device, "tiny": tiny}
        self._head |= {"machine": machine(), "environment": environment()}

    def add(self, row: Row, *, complete: bool = False) -> None:
        """One more row of the table."""
        self.rows.append(row)
        self.write(complete=complete)

    def write(self, *, complete: bool) -> None:
        """Both files; ``complete`` where no row is missing."""
        head = {**self._head, "seconds": round(time.monotonic() - self._began, 1)}
        head["complete"] = complete
        write_json(self._out / f"{self._name}.json", {**head, "rows": [dict(r) for r in self.rows]})
        text = markdown.write([self._section(head)])
        write_text(self._out / f"{self._name}.md", text)

    def _section(self, head: Mapping[str, Any]) -> Section:
        end = "" if head["complete"] else "; cut off: rows are missing"
        sizes = "; TINY sizes, of no meaning" if head["tiny"] else ""
        machine, packages = head["machine"], head["environment"]["packages"]
        versions = [f"{n} {v}" for n, v in {**packages, **machine["packages"]}.items()]
        text = (
            f"{self._item.shows}.",
            f"{head['device']}: {machine['card']}; {head['seconds']} s{end}{sizes}.",
            f"`{head['command']}`",
            ", ".join(versions) + ".",
        )
        heads = list(dict.fromkeys(key for row in self.rows for key in row))
        cells = [[_cell(row.get(key)) for key in heads] for row in self.rows]
        return Section(self._name, text, table(heads, cells) if heads else None, depth=1)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def command_line() -> str:
    """What was typed."""
    return " ".join(["python -m tools.gpu", *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """The card and its driver, asked without starting CUDA in this process, and more versions."""
    try:
        asked = subprocess.run(QUERY, capture_output=True, text=True, timeout=30)
        card = "; ".join(asked.stdout.split("\n")).strip("; ") if asked.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        card = ""
    versions = {}
    for name in ("triton", "peft"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"card": card or "no card", "cores": os.cpu_count(), "packages": versions}


def failed(rows: Sequence[Row]) -> list[Row]:
    """Rows whose promise does not hold."""
    return [row for row in rows if row.get("ok") is False]
