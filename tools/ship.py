"""Puts the report of a suite of a store among the results that come with the project.

``python -m tools.ship STORE SUITE`` copies the tables and pictures as they are.  Of
``leaderboard.json`` it keeps what the site and ``compare`` read: metrics stand in ``runs.csv``, the
ratios of a verdict in its table, and what the paper prints comes with the project once.
``runs.csv`` has no gaps, which are differences of its lines, no share of the ceiling reached, which
is forget_loss over ceiling.loss, no distances and settings, which are in ``leaderboard.json``, no
column that another one says, and the first twelve digits of digests.
Fractions have six digits there and five in ``runs.csv``, four where tables print three at most;
distances by seed, which ``compare`` tests, have ten.  So the wheel stays below two megabytes.

Of a sweep it keeps the report and the pictures, under ``maps``.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.pipeline.sweeping import CELLS
from stable_forgetting.benchmarks.report.shipped import RESULTS

BULKY = ("gaps", "dynamics", "parts", "worst", "edges", "metrics")
KEPT = ("ag", "ag4")
LEFT_OUT = ("gap.", "config.", "ceiling.reached", "distance")
DERIVED = ("ua", "fq")
"""Columns of ``runs.csv`` that another one says: 100 - fa, and 10 to the power of log10_fq."""
ELSEWHERE = ("audits", "published")
RATIOS = ("ratio", "answers")
"""Of a verdict."""
SUMMARY = ("mean", "low", "high")
TRIAL = ("row", "gap", "chosen")
"""Of a trial, whose settings the suite draws anew."""
COST = ("seconds", "base_parameters")
BY_SEED = "ag_per_seed"
COARSE = re.compile(r".*loss|js_.*|mia_.*|.*_odds.*|.*prob|.*truth_ratio")
"""Columns whose fractions have four digits."""
_FRACTION = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
"""A cell that is a number with a fraction."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
"""A cell that is a digest."""


def thin(board: dict[str, Any]) -> dict[str, Any]:
    """A leaderboard without what only its tables show."""
    rows = []
    for row in board["rows"]:
        own = {key: value for key, value in row.items() if key not in BULKY}
        own["derived"] = {
            key: {part: row["derived"][key][part] for part in SUMMARY}
            for key in KEPT
            if key in row["derived"]
        }
        own["cost"] = {key: value for key, value in (row["cost"] or {}).items() if key in COST}
        if own.get("verdict"):
            own["verdict"] = {k: v for k, v in own["verdict"].items() if k not in RATIOS}
        rows.append(own)
    others = {key: value for key, value in board.items() if key not in ELSEWHERE}
    if board.get("tuning"):
        trials = [{key: own[key] for key in TRIAL} for own in board["tuning"]["sweep"]]
        others["tuning"] = {**board["tuning"], "sweep": trials}
    settings = stated(board["settings"])
    whole: dict[str, Any] = rounded({**others, "settings": settings, "rows": rows})
    return whole


def stated(value: Any) -> Any:
    """Settings without those that say nothing."""
    if isinstance(value, dict):
        return {key: stated(own) for key, own in value.items() if own is not None}
    return value


def rounded(value: Any, digits: int = 6) -> Any:
    """The same with fractions of so many significant digits: distances by seed have ten."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {k: rounded(v, 10 if k == BY_SEED else digits) for k, v in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, list) else value


def shortened(text: str) -> str:
    """The same CSV without gaps and settings, fractions at five significant digits or four."""
    heads, *lines = csv.reader(io.StringIO(text))
    kept = [
        place
        for place, head in enumerate(heads)
        if head not in DERIVED and not head.startswith(LEFT_OUT)
    ]
    stream = io.StringIO()
    rows = ([_short(heads[place], line[place]) for place in kept] for line in (heads, *lines))
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def _short(head: str, cell: str) -> str:
    if _DIGEST.fullmatch(cell):
        return cell[:12]
    if not _FRACTION.fullmatch(cell):
        return cell
    return repr(float(f"{float(cell):.{4 if COARSE.fullmatch(head) else 5}g}"))


def ship(store: Path, suite: str) -> Path:
    """Copies a suite's report from a store; the folder among the results."""
    source, target = store / "suites" / suite, RESULTS / suite
    if (source / CELLS).exists():  # no other report has it
        return _ship_sweep(source)
    target.mkdir(exist_ok=True)
    for file in [*source.glob("*.md"), *source.glob("*.svg")]:
        shutil.copy(file, target)
    runs = shortened((source / "runs.csv").read_text("utf-8"))
    (target / "runs.csv").write_text(runs, encoding="utf-8")
    board = thin(json.loads((source / "leaderboard.json").read_text("utf-8")))
    text = json.dumps(board, separators=(",", ":"))
    (target / "leaderboard.json").write_text(text + "\n", encoding="utf-8")
    return target


def _ship_sweep(source: Path) -> Path:
    target = RESULTS / "maps" / source.name
    target.mkdir(exist_ok=True)
    _, report = (source / "LEADERBOARD.md").read_text("utf-8").split("\n", 1)
    report = report.replace("(leaderboard.svg)", "(map.svg)")
    head = f"# {source.name}: stability map (measured)\n"
    (target / "MAP.md").write_text(head + report, encoding="utf-8")
    shutil.copy(source / "leaderboard.svg", target / "map.svg")
    if (source / "depth.svg").exists():
        shutil.copy(source / "depth.svg", target)
    return target


if __name__ == "__main__":
    sys.stdout.write(f"{ship(Path(sys.argv[1]), sys.argv[2])}\n")
