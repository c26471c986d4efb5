"""``python -m tools.perf.grid --out DIR``: how the cost of a suite grows, by real commands.

On one store a suite gets a row more at a time, and is then asked for again; on stores of their own
the whole suite is run by several numbers of workers.  Stages are counted, so on a busy machine they
and the seconds on a processor say more than those on a clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.files import write_text

BASE = ("original", "retrain")
SHORT = ("protocol.train.epochs=12", "protocol.minimum_train_accuracy=95")
HEADS = ("rows", "workers", "stages worked on", "seconds of these", "processor s", "clock s")
READING = (
    "seconds of these: what the stages themselves took, without starting and reporting; processor s"
    " and clock s: of the whole command, with its workers, its imports and its report."
)


@dataclass(frozen=True)
class Cost:
    """What one command did.

    Attributes:
        rows: Of the suite, besides Original and Retrain.
        workers: Processes asked for.
        stages: Kind -> how many were worked on.
        inside: Seconds of these stages.
        cpu: Seconds on a processor, all processes together.
        wall: Seconds on a clock.
    """

    rows: tuple[str, ...]
    workers: int
    stages: dict[str, int]
    inside: float
    cpu: float
    wall: float


def run(suite: str, rows: Sequence[str], store: Path, sets: Sequence[str], workers: int) -> Cost:
    """Runs a suite's references and ``rows`` on a store.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    before, began, clock = set(store.glob("stages/*")), _cpu(), time.monotonic()
    chosen = ["--only", ",".join([*BASE, *rows]), "--seeds", "1", "--device", "cpu"]
    given = [item for text in sets for item in ("--set", text)]
    command = [
        sys.executable,
        "-m",
        "stable_forgetting.benchmarks",
        "run",
        suite,
        "--store",
        str(store),
        *chosen,
    ]
    command += ["--workers", str(workers), *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    wall, cpu = time.monotonic() - clock, _cpu() - began
    stages: dict[str, int] = {}
    inside = 0.0
    for folder in set(store.glob("stages/*")) - before:
        kind = folder.name.partition("-")[0]
        stages[kind] = stages.get(kind, 0) + 1
        inside += json.loads((folder / "done.json").read_text())["stage_seconds"]
    return Cost(tuple(rows), workers, stages, inside, cpu, wall)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def costs(
    suite: str, rows: Sequence[str], sets: Sequence[str], workers: Sequence[int], root: Path
) -> Iterator[Cost]:
    """A row more at a time; the same again; all at once by each number of workers."""
    for count in (*range(len(rows) + 1), len(rows)):
        yield run(suite, rows[:count], root / "growing", sets, 1)
    for count in workers:
        yield run(suite, rows, root / f"workers-{count}", sets, count)


def section(suite: str, results: Sequence[Cost]) -> Section:
    """The table."""
    lines = []
    for cost in results:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(cost.stages.items()))
        total = sum(cost.stages.values())
        seconds = [f"{value:.1f}" for value in (cost.inside, cost.cpu, cost.wall)]
        stages = f"{total} ({kinds})" if total else "0"
        lines.append([", ".join(cost.rows) or "none", str(cost.workers), stages, *seconds])
    load = f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors. {READING}"
    return Section(f"How the cost of {suite} grows", (load,), table(HEADS, lines), depth=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.perf.grid",
        description="How the cost of a suite grows with its rows and with workers.",
        epilog="Example:  python -m tools.perf.grid --rows finetune,gd_sine --out runs/grid",
    )
    parser.add_argument("--suite", default="digits-class", help="name or file (digits-class)")
    parser.add_argument("--rows", default="finetune,gd,gd_sine", help="added one by one")
    parser.add_argument("--set", action="append", default=[], help="override (12 epochs)")
    parser.add_argument("--workers", default="1,2,4", help="numbers of processes (1,2,4)")
    parser.add_argument("--out", type=Path, required=True, help="folder for GRID.md")
    given = parser.parse_args(argv)
    workers = [int(count) for count in given.workers.split(",")]
    with tempfile.TemporaryDirectory() as root:
        grid = costs(given.suite, given.rows.split(","), given.set or SHORT, workers, Path(root))
        text = markdown.write([section(given.suite, list(grid))])
    write_text(given.out / "GRID.md", text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
