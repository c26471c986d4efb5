"""Questions that whole commands answer: run twice, killed, side by side, at full size."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from stable_forgetting.common.base.errors import named_line
from stable_forgetting.common.store.stages import DONE
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.tdec import notes
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.models.families import PUBLISHED
from tools.faults.child import Child, Ended, command
from tools.faults.trials import kills as kills_of
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
REHEARSED = (
    *("cifar10-scratch-all", "cifar100-class10", "tofu-small", "tdec-small", "muse-invented"),
    "tofu-llama2-7b-forget10",
)
KNOWN = "digits-class"
"""A suite whose table was measured on a CPU and comes with the package."""
KNOWN_ROWS = "original,retrain,finetune,gd,gd_lora,gd_tanh,gd_sine"
METRICS = ("fa", "ra", "ta", "mia")
MARGIN = 20.0
"""Seconds of a sitting that are left for the report."""
SHARING = 12
"""Workers of a sitting at most, which share the card; two cores are left to others."""
WIDE = (
    *("model.dim=768", "model.depth=12", "model.heads=12"),
    *("train.lr=6e-4", "train.warmup_steps=200"),
)
"""A GPT-Neo of 85 million parameters beside its embeddings, and a rate for its width."""


def start(job: Job, *args: object) -> Child:
    """Starts ``unlearn ARGS --device`` in a forked process."""
    logs = job.work / "logs"
    return command(logs / str(len(list(logs.glob("*")))), *args, "--device", job.device)


def unlearn(job: Job, *args: object, limit: float | None = None) -> Ended:
    """``unlearn ARGS --device`` to its end; killed when the item's time is over."""
    return start(job, *args).wait(limit or job.seconds)


def last_line(ended: Ended) -> str:
    """What a command that failed said in the end; empty where it did not fail."""
    return (ended.err.strip().splitlines() or [""])[-1][:300] if ended.code else ""


def write_suite(job: Job, content: dict[str, Any]) -> Path:
    """The file of a suite."""
    job.work.mkdir(parents=True, exist_ok=True)
    path = job.work / f"{content['suite']}.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return path


def fresh(job: Job, name: str) -> Path:
    """A store that is not there yet."""
    return job.work / f"{name}-{len(list(job.work.glob(f'{name}-*')))}"


def settings(*texts: str) -> list[str]:
    """As options of the command line."""
    return [item for text in texts for item in ("--set", text)]


def rehearsals(job: Job) -> Iterator[Row]:
    """One row per suite; all are rehearsed at once."""
    root = [] if job.data_root is None else ["--data-root", job.data_root]
    rows = ["--only", "finetune"] if job.tiny else []
    end = time.monotonic() + job.seconds
    children = {
        suite: start(job, "run", suite, "--rehearse", *rows, *root)
        for suite in REHEARSED[: 1 if job.tiny else None]
    }
    for suite, child in children.items():
        ended = child.wait(end - time.monotonic())
        lines = re.findall(rf"^{suite}\S*: (\S+): (.+) \(([\d.]+) s\)$", ended.out, re.MULTILINE)
        bad = {row: text for row, text, _ in lines if text != "ok" and "applicable" not in text}
        says = "; ".join(f"{row}: {text}" for row, text in bad.items()) or last_line(ended)
        seconds = sum(float(spent) for *_, spent in lines)
        result = {"suite": suite, "rows": len(lines), "failed": len(bad), "seconds": seconds}
        yield {**result, "says": says, "ok": ended.code == 0 and bool(lines)}


# Equal results -----------------------------------------------------------------------------------


def bits(job: Job) -> Iterator[Row]:
    """The jobs of the fault campaign made twice, and a text suite made twice."""
    path = write_suite(job, TEXT)
    world = World(fresh(job, "world"), job.device)
    for name in world.answers:
        with world.place(name) as place:
            ended = world.do(name, place)
            yield _compared(f"images, {name} again", ended, world.answers[name], contents(place))
    stores = (fresh(job, "texts-one"), fresh(job, "texts-two"))
    runs = [unlearn(job, "run", path, "--store", s, "--workers", 1) for s in stores]
    yield _compared("texts, run again", runs[-1], *map(contents, stores))


def kills(job: Job) -> Iterator[Row]:
    """The jobs of the fault campaign, killed at random times and started again until they end."""
    world = World(fresh(job, "killed"), job.device)
    for number, name in enumerate(("run",) if job.tiny else ("attack", "run", "apply", "sweep")):
        until = time.monotonic() + job.seconds / 8
        tally = kills_of(name)(world, Random(number), 2 if job.tiny else 40, until)
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
    path = write_suite(job, SUITE)
    stores = [fresh(job, name) for name in ("alone", "workers", "launched")]
    ended = unlearn(job, "run", path, "--store", stores[0], "--workers", 1)
    right = contents(stores[0])
    yield _compared("one process", ended, right, right)
    ended = unlearn(job, "run", path, "--store", stores[1], "--workers", 2)
    yield _compared("two workers", ended, right, contents(stores[1]))
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--cpu"] if job.device == "cpu" else []
    run = ["-m", "stable_forgetting.benchmarks", "run", str(path), "--store", str(stores[2])]
    every = [sys.executable, *launch, *run, "--device", job.device]
    done = subprocess.run(every, capture_output=True, text=True)
    ended = Ended(done.returncode, done.stdout, done.stderr)
    yield _compared("accelerate launch", ended, right, contents(stores[2]))


def precision(job: Job) -> Iterator[Row]:
    """Metrics of every row in three precisions, beside the table that comes with the package.

    The three runs share the card.
    """
    shipped = files("stable_forgetting.benchmarks") / "results" / KNOWN / "runs.csv"
    known = _metrics(Path(str(shipped)))
    rows, seeds = ("original,gd_sine", "1") if job.tiny else (KNOWN_ROWS, "1,2")
    fewer = [f"protocol.train.{text}" for text in ("epochs=1", "warmup_steps=0")]
    short = settings(*fewer, "protocol.minimum_train_accuracy=0") if job.tiny else []
    stores, children = {}, {}
    for kind in ("no", "bf16", "fp16")[: 2 if job.tiny else None]:
        stores[kind] = fresh(job, f"precision-{kind}")
        quoted = f"mixed_precision='{kind}'"  # a bare no is false in YAML
        sets = settings(f"protocol.train.{quoted}", f"defaults.{quoted}") + short
        only = ("--only", rows, "--seeds", seeds, "--workers", 1)
        children[kind] = start(job, "run", KNOWN, "--store", stores[kind], *only, *sets)
    end = time.monotonic() + job.seconds
    for kind, child in children.items():
        ended = child.wait(end - time.monotonic())
        boards = [*stores[kind].glob("suites/*/runs.csv")]
        found = _metrics(boards[0]) if boards else {}
        if not found:
            yield {"precision": kind, "says": last_line(ended), "ok": False}
        for row, values in found.items():
            beside = {f"{k}, CPU": v for k, v in known.get(row, {}).items()}
            yield {"precision": kind, "row": row, **values, **beside}


def _metrics(path: Path) -> dict[str, dict[str, float]]:
    """Row -> mean metrics over the seeds of a ``runs.csv``."""
    runs: dict[str, list[dict[str, str]]] = {}
    with path.open(encoding="utf-8", newline="") as lines:
        for run in csv.DictReader(lines):
            if run["replicate"] == "0" and run[METRICS[0]]:
                runs.setdefault(run["row"], []).append(run)
    return {
        row: {name: fmean(float(run[name]) for run in found) for name in METRICS}
        for row, found in runs.items()
    }


def tests(job: Job) -> Iterator[Row]:
    """Counts of the test suite, and one row per test that fails."""
    job.work.mkdir(parents=True, exist_ok=True)
    report = job.work / "tests.xml"
    asked = ["tests/test_pinned_keys.py"] if job.tiny else ["tests"]
    workers = 0 if job.tiny else max(1, min(12, (os.cpu_count() or 1) - 2))
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
    tree = ElementTree.parse(report)
    suite = next(tree.iter("testsuite")).attrib
    counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
    yield {"test": "all", **counts, "seconds": float(suite["time"]), "ok": done.returncode == 0}
    for case in tree.iter("testcase"):
        for bad in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            yield {"test": name, "says": (bad.get("message") or "")[:200], "ok": False}


# A model of LLaMA-2-7B's shape -------------------------------------------------------------------


def llama_suite(folder: Path, tiny: bool) -> dict[str, Any]:
    """Fine-tuning, bounded unlearning and its LoRA control on a folder's model."""
    return {
        "suite": "gpu-llama",
        "benchmark": "tofu",
        "protocol": {
            "data": {"name": "fictitious", "authors": 3 if tiny else 20, "forget_authors": 2},
            "model": {
                "name": str(folder),
                "original": str(folder),
                "retrain": {"1-authors": str(folder)},  # training it would take 16 bytes a weight
                "dtype": "bfloat16",
                "gradient_checkpointing": False,
            },
            "scenario": {"kind": "authors", "forget_authors": 1},
            "train": {"steps": 1, "batch_size": 1},
            "evaluation": {"max_new_tokens": 4 if tiny else 32, "retain_samples": 20},
            "minimum_train_accuracy": 0,
        },
        "seeds": [1],
        "retrains": 1,
        "columns": ["mu"],
        "defaults": {
            "steps": 2 if tiny else 20,
            "batch_size": 2 if tiny else 8,
            "mixed_precision": "bf16",
        },
        "methods": dict.fromkeys(("original", "retrain", "finetune_lora", "gd_lora", "gd_sine")),
    }


def write_llama(folder: Path, device: str, tiny: bool) -> None:
    """A folder in the hub's layout: random bfloat16 weights, a byte-level tokenizer."""
    from tools.gpu.speed import random_causal, tiny_fields  # not where jobs are forked

    texts = islice(notes(), 20 if tiny else 400)  # they never end
    words = Corpus(tuple(Item("train", -1, "", text) for text in texts), "")
    tokenizer = train_tokenizer(words, 400 if tiny else 4000)
    fields = dict(PUBLISHED["llama-2-7b"][1])
    if tiny:
        fields = tiny_fields(2) | {"vocab_size": len(tokenizer) + 8}
    tokenizer.save_pretrained(folder)
    drawn = random_causal("llama", fields, device, torch.bfloat16)
    drawn.config.eos_token_id = tokenizer.eos_token_id
    drawn.save_pretrained(folder)


def llama(job: Job) -> Iterator[Row]:
    """One row per stage: what it cost."""
    folder = job.work / "model"
    path, store = write_suite(job, llama_suite(folder, job.tiny)), fresh(job, "store")
    if not (folder / "config.json").is_file():
        writing = Child(job.work / "writing", lambda: write_llama(folder, job.device, job.tiny))
        made = writing.wait(job.seconds)
        if made.code:
            yield {"stage": "model", "says": made.err.strip()[-300:], "ok": False}
            return
    ended = unlearn(job, "run", path, "--store", store, "--workers", 1)
    for done in sorted(store.glob(f"stages/*/{DONE}"), key=lambda file: file.stat().st_mtime):
        facts = json.loads(done.read_text(encoding="utf-8"))
        cost = facts.get("cost") or {}
        row = {"stage": facts["name"], "kind": facts["kind"], "stage s": facts["stage_seconds"]}
        steps, seconds, peak = (cost.get(key) for key in ("steps", "seconds", "peak_bytes"))
        row |= {"steps": steps, "ms per step": 1e3 * seconds / steps if steps and seconds else None}
        yield {**row, "peak GB": peak / 1e9 if peak else None}
    yield {"stage": "all", "kind": "run", "says": last_line(ended), "ok": ended.code == 0}


# Suites at full size, a sitting at a time --------------------------------------------------------


def cifar(job: Job) -> Iterator[Row]:
    """Every row on ViT-S from scratch at 32 px."""
    return _sitting(job, "cifar10-scratch-all", range(1, 4), ())


def transfer(job: Job) -> Iterator[Row]:
    """A random tenth forgotten after a pretraining, at ViT-S size."""
    return _sitting(job, "cifar10-transfer-vit-s", range(1, 6), ())


def tofu(job: Job) -> Iterator[Row]:
    """All 200 authors, 20 of them forgotten."""
    authors = ("data.authors=180", "data.forget_authors=20", "scenario.forget_authors=20")
    return _sitting(job, "tofu-small", range(1, 6), (*WIDE, *authors))


def tdec(job: Job) -> Iterator[Row]:
    """The real texts, learnt by heart by a model of GPT-Neo-125M's width and depth.

    A worker needed up to 19 GB before the cache of its answers was bounded; not measured since.
    """
    return _sitting(job, "tdec-90m", range(3), (), sharing=7)


def _sitting(
    job: Job, suite: str, seeds: Sequence[int], protocol: Sequence[str], sharing: int = SHARING
) -> Iterator[Row]:
    """One row for the first seed and one for all; keeps the report of what is complete.

    Workers share the card: a model this small waits for its launches, not for the card.  Tuning
    belongs to the first seed; those after it have most to do side by side.
    """
    store, end = job.work / "store", time.monotonic() + job.seconds - MARGIN
    words = settings(*(f"protocol.{text}" for text in protocol))
    if protocol:
        words += settings("protocol.train.mixed_precision=bf16", "defaults.mixed_precision=bf16")
    words += [] if job.data_root is None else ["--data-root", str(job.data_root)]
    workers = max(1, min(sharing, (os.cpu_count() or 1) - 2))
    if job.tiny:
        words, suite, seeds, workers = [], str(write_suite(job, SUITE)), (1,), 1
    for count in sorted({1, len(seeds)}):
        began = time.monotonic()
        taken = ",".join(map(str, seeds[:count]))
        run = ("run", suite, "--store", store, "--workers", workers, "--seeds", taken, *words)
        ended = unlearn(job, *run, limit=max(1.0, end - began))
        for report in store.glob("suites/*/LEADERBOARD.md"):
            for path in report.parent.glob("*.*"):
                shutil.copy(path, job.work.parent / f"{job.work.name}-{path.name}")
        says = "cut off: run it again" if ended.code < 0 else last_line(ended)
        row = {"suite": suite, "seeds": taken, "stages": len([*store.glob(f"stages/*/{DONE}")])}
        row |= {"seconds": time.monotonic() - began, "complete": ended.code == 0, "says": says}
        yield {**row, "ok": ended.code <= 0}
        if ended.code:
            return
