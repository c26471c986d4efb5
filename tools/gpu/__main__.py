"""``python -m tools.gpu ITEM.. --out FOLDER``: questions to a GPU, in turn, a table each."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import named_line
from stable_forgetting.common.base.files import write_json, write_text
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.store.records import environment
from tools.gpu.items import ITEMS, LIMIT, Job, Row

SCHEMA = 1
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""Else asking whether there is a card starts CUDA, and forked jobs could not use it."""
QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def run_here(name: str, job: Job) -> bool:
    """Runs one item in this process, deterministic as stages are; whether its promises hold.

    Its files are written anew after every row: whoever is cut off leaves the rows so far.
    """
    make_deterministic()
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    head = {"schema": SCHEMA, "item": name, "shows": ITEMS[name].shows, "device": job.device}
    head |= {"tiny": job.tiny, "card": card(), "cores": os.cpu_count()}
    head |= {"command": " ".join(["python -m tools.gpu", *sys.argv[1:]])}
    head |= {"environment": environment()}

    def write(complete: bool) -> None:
        seconds = round(time.monotonic() - began, 1)
        record = {**head, "seconds": seconds, "complete": complete, "rows": rows}
        write_json(job.work.with_suffix(".json"), record)
        write_text(job.work.with_suffix(".md"), page(record))

    try:
        for row in ITEMS[name].rows(job):
            rows.append(dict(row))
            write(complete=False)
            text = ", ".join(f"{key} {value}" for key, value in row.items() if value is not None)
            print(f"{name}: {text}", flush=True)  # noqa: T201
    except Exception as error:  # whatever a new machine says belongs into the table
        rows.append({"says": named_line(error), "ok": False})
        write(complete=False)
        return False
    write(complete=True)
    return not failed(rows)


def failed(rows: Sequence[Row]) -> list[Row]:
    """Rows whose promise does not hold."""
    return [row for row in rows if row.get("ok") is False]


def page(record: dict[str, Any]) -> str:
    """The Markdown of an item's record."""
    end = "" if record["complete"] else "; cut off: rows are missing"
    sizes = "; TINY sizes, of no meaning" if record["tiny"] else ""
    versions = (f"{name} {version}" for name, version in record["environment"]["packages"].items())
    text = (
        f"{record['shows']}.",
        f"{record['device']}: {record['card']}; {record['seconds']} s{end}{sizes}.",
        f"`{record['command']}`",
        f"{', '.join(versions)}.",
    )
    heads = list(dict.fromkeys(key for row in record["rows"] for key in row))
    cells = [[_cell(row.get(key)) for key in heads] for row in record["rows"]]
    numbers = {head for head in heads if all(_is_number(row.get(head)) for row in record["rows"])}
    columns = [Column(head, "number" if head in numbers else "words") for head in heads]
    content = table(columns, cells) if heads else None
    return markdown.write([Section(record["item"], text, content, depth=1)])


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def card() -> str:
    """The card and its driver, asked without starting CUDA in this process."""
    try:
        asked = subprocess.run(QUERY, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "no card"
    return "; ".join(asked.stdout.strip().split("\n")) if asked.returncode == 0 else "no card"


def run_apart(name: str, options: Sequence[str], seconds: float) -> str:
    """Runs one item in a process of its own, which is killed in the end; how it ended."""
    command = [sys.executable, "-m", "tools.gpu", name, *options]
    command += ["--minutes", f"{seconds / 60:.2f}"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the card must be free for the next item
            return "cut off"
    return {0: "ok", 1: "FAILED"}.get(code, f"code {code}")


def run_in_turn(names: Sequence[str], job: Job, minutes: float | None) -> bool:
    """Runs items until the time is over, and keeps ``SUMMARY.md`` after each."""
    options = ["--out", str(job.work), "--device", job.device, *(["--tiny"] if job.tiny else [])]
    options += ["--data-root", str(job.data_root)] if job.data_root is not None else []
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    ends: list[tuple[str, str, str]] = []
    for name in names:
        began = time.monotonic()
        left = min(LIMIT, end - began)
        how = run_apart(name, options, left) if left > 30 else "no time left"
        ends.append((name, how, f"{time.monotonic() - began:.0f}"))
        content = table(["item", "how it ended", "wall time (s)"], ends)
        text = ("The files beside this one say the rest.",)
        summary = markdown.write([Section("First contact with a GPU", text, content, depth=1)])
        write_text(job.work / "SUMMARY.md", summary)
    return all(how == "ok" for _, how, _ in ends)


def listing() -> str:
    """The table of ``ls``."""
    rows = [
        [f"`{name}`", f"{item.minutes:g}", item.shows, item.basis] for name, item in ITEMS.items()
    ]
    content = table(["item", "minutes", "what it shows", "minutes from"], rows, words=True)
    text = ("Minutes are for one card of 80 to 140 GB; what was measured was on an H200.",)
    return markdown.write([Section("Questions to a GPU", text, content, depth=1)])


def refusal(names: Sequence[str], device: str) -> str:
    """Why nothing can be asked; empty where all can.

    The device is tried in another process: one that has started CUDA cannot fork children.
    """
    for name in names:
        if name not in ITEMS:
            return f"{name}: no such item{did_you_mean(name, ['ls', 'all', *ITEMS])}; see ls"
    code = "import sys, torch; torch.empty(1, device=sys.argv[1])"
    tried = [sys.executable, "-c", code, device]
    if device != "cpu" and subprocess.run(tried, capture_output=True).returncode:
        return f"--device {device}: not a device that torch has here; try --device cpu"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Asks; 1 where a promise does not hold."""
    root = os.environ.get("SF_DATA_ROOT")
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu",
        description="First contact with a GPU: one question per item, a table for each.",
        epilog="Example:  python -m tools.gpu kernels --out runs/gpu",
    )
    parser.add_argument("items", nargs="+", help="ls (what there is), all, or items")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder (runs/gpu)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu, ... (cuda)")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU does in seconds")
    parser.add_argument("--data-root", type=Path, default=root, help="folder with local data sets")
    parser.add_argument("--minutes", type=float, help="wall time; what is unfinished is cut off")
    given = parser.parse_args(argv)
    if given.items == ["ls"]:
        sys.stdout.write(listing())
        return 0
    names = [*ITEMS] if given.items == ["all"] else given.items
    if text := refusal(names, given.device):
        sys.stderr.write(f"error: {text}\n")
        return 2
    job = Job(given.out, given.device, given.tiny, given.data_root and Path(given.data_root))
    if len(names) > 1:
        return int(not run_in_turn(names, job, given.minutes))
    seconds = LIMIT if given.minutes is None else min(LIMIT, 60 * given.minutes)
    own = dataclasses.replace(job, work=given.out / names[0], seconds=seconds)
    return int(not run_here(names[0], own))


if __name__ == "__main__":
    sys.exit(main())
