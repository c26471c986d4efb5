"""Questions that whole commands answer: run twice, killed, side by side, in other precisions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

from stable_forgetting.common.base.errors import named_line
from tools.faults.child import Ended, command
from tools.faults.kills import kills
from tools.faults.world import SUITE, World, contents
from tools.gpu.items import Job, Row

ROOT = Path(__file__).resolve().parents[2]
TEXT: dict[str, Any] = {
    "suite": "gpu-text",
    "benchmark": "tofu",
    "protocol": {
        "data": {"name": "fictitious", "authors": 2, "forget_authors": 3, "questions": 4},
        "model": {"name": "tiny", "dim": 32, "depth": 2, "heads": 2, "context": 128},
        "train": {"steps": 6, "batch_size": 8, "lr": 1e-3},
        "evaluation": {"max_new_tokens": 4},
        "minimum_train_accuracy": 0,
    },
    "seeds": [1],
    "retrains": 1,
    "columns": ["mu"],
    "defaults": {"steps": 4, "batch_size": 4},
    "methods": {"original": None, "retrain": None, "gd_sine": None, "npo_gdr": None},
}
REHEARSED = {
    "cifar10-scratch-all": None,
    "cifar100-class10": None,
    "tofu-small": None,
    "tdec-small": None,
    "muse-invented": None,
    "tofu-llama2-7b-forget10": None,
}
"""Suite -> the rows to rehearse; all where absent."""
REHEARSED_TINY = {"cifar10-scratch-all": "finetune"}
KNOWN = "digits-class"
"""A suite whose table was measured on a CPU and comes with the package."""
KNOWN_ROWS = "original,retrain,finetune,gd,gd_lora,gd_tanh,gd_sine"
METRICS = ("fa", "ra", "ta", "mia")


def unlearn(job: Job, *args: object, limit: float | None = None) -> Ended:
    """``unlearn ARGS --device`` in a forked process; killed when the item's time is over."""
    logs = job.work / "logs"
    place = logs / str(len(list(logs.glob("*"))) if logs.is_dir() else 0)
    return command(place, *args, "--device", job.device).wait(limit or job.seconds)


def suites(job: Job) -> Mapping[str, Path]:
    """Small suites of both arms: name -> file."""
    job.work.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, content in {"images": SUITE, "texts": TEXT}.items():
        paths[name] = job.work / f"{name}.yaml"
        paths[name].write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return paths


def fresh(job: Job, name: str) -> Path:
    """A store that is not there yet."""
    stamp = f"{name}-{len(list(job.work.glob(f'{name}-*')))}"
    return job.work / stamp


def rehearsals(job: Job) -> Iterator[Row]:
    """One row per suite."""
    root = [] if job.data_root is None else ["--data-root", job.data_root]
    for suite, only in (REHEARSED_TINY if job.tiny else REHEARSED).items():
        rows = [] if only is None else ["--only", only]
        began = time.monotonic()
        ended = unlearn(job, "run", suite, "--rehearse", *rows, *root)
        seconds = time.monotonic() - began
        lines = re.findall(rf"^{suite}\S*: (\S+): (.+) \([\d.]+ s\)$", ended.out, re.MULTILINE)
        bad = {row: text for row, text in lines if text != "ok" and "applicable" not in text}
        says = "; ".join(f"{row}: {text}" for row, text in bad.items()) or last_line(ended)
        result = {"suite": suite, "rows": len(lines), "failed": len(bad), "seconds": seconds}
        yield {**result, "says": says, "ok": ended.code == 0 and bool(lines)}


def last_line(ended: Ended) -> str:
    """What a command that failed said in the end; empty where it did not fail."""
    return (ended.err.strip().splitlines() or [""])[-1][:300] if ended.code else ""


def bits(job: Job) -> Iterator[Row]:
    """The jobs of the fault campaign made twice, a text suite made twice, then jobs with kills."""
    job.work.mkdir(parents=True, exist_ok=True)
    world = World(fresh(job, "world"), job.device)
    world.prepare()
    for name in world.answers:
        with world.place(name) as place:
            ended = world.do(name, place)
            yield _compared(f"images, {name} again", ended, world.answers[name], contents(place))
    path, stores = suites(job)["texts"], (fresh(job, "texts-one"), fresh(job, "texts-two"))
    runs = [unlearn(job, "run", path, "--store", s, "--executor", "inline") for s in stores]
    yield _compared("texts, run again", runs[-1], *map(contents, stores))
    for number, name in enumerate(("run",) if job.tiny else ("run", "apply", "sweep", "audit")):
        until = time.monotonic() + (1 if job.tiny else job.seconds / 8)
        tally = kills(world, Random(number), name, 2 if job.tiny else 40, until)
        result = {"what": f"images, {name} killed", "kills": tally.tried, **tally.outcomes}
        says = "; ".join(tally.breaches[:3])
        yield {**result, "says": says, "ok": tally.tried > 0 and not tally.breaches}


def _compared(
    what: str, ended: Ended, first: Mapping[str, str], second: Mapping[str, str]
) -> dict[str, Any]:
    other = sorted(k for k in first.keys() | second.keys() if first.get(k) != second.get(k))
    ok = ended.code == 0 and bool(first) and not other
    result = {"what": what, "files": len(first), "other bits": len(other)}
    return {**result, "says": last_line(ended) or ", ".join(other[:3]), "ok": ok}


def processes(job: Job) -> Iterator[Row]:
    """Stores that one process, two workers and accelerate's launcher filled."""
    path = suites(job)["images"]
    alone = fresh(job, "alone")
    ended = unlearn(job, "run", path, "--store", alone, "--executor", "inline")
    right = contents(alone)
    yield _compared("one process", ended, right, right)
    workers = fresh(job, "workers")
    ended = unlearn(job, "run", path, "--store", workers, "--workers", 2)
    yield _compared("two workers", ended, right, contents(workers))
    launched = fresh(job, "launched")
    launch = ["accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--cpu"] if job.device == "cpu" else []
    run = [
        "-m",
        "stable_forgetting.benchmarks",
        "run",
        path,
        "--store",
        launched,
        "--device",
        job.device,
    ]
    done = subprocess.run(
        [sys.executable, "-m", *launch, *map(str, run)], capture_output=True, text=True
    )
    ended = Ended(done.returncode, done.stdout, done.stderr)
    yield _compared("accelerate launch", ended, right, contents(launched))


# Tables ------------------------------------------------------------------------------------------


def precision(job: Job) -> Iterator[Row]:
    """Metrics of every row in three precisions, beside the table that comes with the package."""
    known = _metrics(
        Path(str(files("stable_forgetting.benchmarks") / "results" / KNOWN / "leaderboard.json"))
    )
    rows, seeds = ("original,gd_sine", "1") if job.tiny else (KNOWN_ROWS, "1,2")
    fewer = ("epochs=1", "warmup_steps=0")
    short = [item for text in fewer for item in ("--set", f"protocol.train.{text}")]
    short += ["--set", "protocol.minimum_train_accuracy=0"]
    for kind in ("no", "bf16", "fp16")[: 2 if job.tiny else None]:
        store = fresh(job, f"precision-{kind}")
        quoted = f"'{kind}'"  # a bare no is false in YAML
        both = [f"protocol.train.mixed_precision={quoted}", f"defaults.mixed_precision={quoted}"]
        sets = [item for text in both for item in ("--set", text)] + (short if job.tiny else [])
        only = ("--only", rows, "--seeds", seeds, "--executor", "inline")
        ended = unlearn(job, "run", KNOWN, "--store", store, *only, *sets)
        boards = [*store.glob("suites/*/leaderboard.json")]
        table = _metrics(boards[0]) if boards else {}
        if not table:
            yield {"precision": kind, "says": last_line(ended), "ok": False}
        for row, values in table.items():
            base = {"precision": kind, "row": row}
            yield {**base, **values, **{f"{k}, CPU": v for k, v in known.get(row, {}).items()}}


def _metrics(path: Path) -> dict[str, dict[str, float]]:
    """Row -> mean metrics of a leaderboard."""
    board = json.loads(path.read_text(encoding="utf-8"))
    return {
        row["row"]: {name: row["metrics"][name]["mean"] for name in METRICS}
        for row in board["rows"]
        if row["metrics"].get(METRICS[0])
    }


def tests(job: Job) -> Iterator[Row]:
    """Counts of the test suite, and one row per test that fails."""
    report = job.work / "tests.xml"
    job.work.mkdir(parents=True, exist_ok=True)
    asked = ["tests/test_pinned_keys.py"] if job.tiny else ["tests"]
    workers = max(1, min(12, (os.cpu_count() or 1) - 2)) if not job.tiny else 0
    spread = ["-n", str(workers), "--dist", "worksteal"]
    quiet = ["-p", "no:cacheprovider", f"--junitxml={report}"]
    arguments = [sys.executable, "-m", "pytest", *asked, *spread, *quiet]
    try:
        done = subprocess.run(arguments, cwd=ROOT, timeout=job.seconds, capture_output=True)
    except subprocess.TimeoutExpired:
        yield {"test": "all", "says": "cut off", "ok": False}
        return
    if not report.is_file():
        yield {"test": "all", "says": named_line(RuntimeError(done.stdout[-300:])), "ok": False}
        return
    suite = next(ElementTree.parse(report).iter("testsuite")).attrib
    counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
    yield {"test": "all", **counts, "seconds": float(suite["time"]), "ok": done.returncode == 0}
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            for bad in case.iter(kind):
                name = f"{case.get('classname')}::{case.get('name')}"
                yield {"test": name, "says": (bad.get("message") or "")[:200], "ok": False}
