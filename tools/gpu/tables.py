"""Suites at full size, a sitting at a time: the next one goes on from the store of the last."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence

from stable_forgetting.common.store.stages import DONE
from tools.gpu.items import Job, Row
from tools.gpu.stores import suites, unlearn

MARGIN = 20.0
"""Seconds of an item that are left for the report."""
WIDE = ("dim=768", "depth=12", "heads=12")
"""A GPT-Neo of 85 million parameters beside its embeddings."""
BF16 = ("protocol.train.mixed_precision=bf16", "defaults.mixed_precision=bf16")


def cifar(job: Job) -> Iterator[Row]:
    """Every row on ViT-S from scratch at 32 px."""
    yield from _sitting(job, "cifar10-scratch-all", ())


def transfer(job: Job) -> Iterator[Row]:
    """Ten of 100 classes forgotten, every row, at ViT-S size."""
    sizes = [f"protocol.model.{size}" for size in ("dim=384", "depth=12", "heads=6")]
    yield from _sitting(job, "cifar100-class10-small-all", [*sizes, *BF16])


def tofu(job: Job) -> Iterator[Row]:
    """All 200 authors, 20 of them forgotten."""
    sizes = [f"protocol.model.{size}" for size in WIDE]
    data = ["protocol.data.authors=180", "protocol.data.forget_authors=20"]
    scenario = ["protocol.scenario.forget_authors=20"]
    yield from _sitting(job, "tofu-small", [*sizes, *data, *scenario, *BF16])


def tdec(job: Job) -> Iterator[Row]:
    """The real texts, learnt by heart by a model of GPT-Neo-125M's width and depth."""
    sizes = [f"protocol.model.{size}" for size in WIDE]
    yield from _sitting(job, "tdec-small", [*sizes, *BF16])


def _sitting(job: Job, suite: str, sets: Sequence[str]) -> Iterator[Row]:
    """Runs what the time allows, then writes the report of what is there."""
    store = job.work / "store"
    given = [item for text in sets for item in ("--set", text)]
    root = ["--data-root", job.data_root] if job.data_root is not None else []
    if job.tiny:
        given, suite, root = [], str(suites(job)["images"]), []
    began = time.monotonic()
    run = ("run", suite, "--store", store, "--workers", 1, *root, *given)
    ended = unlearn(job, *run, limit=max(1.0, job.seconds - MARGIN))
    complete = ended.code == 0
    tables = [*store.glob("suites/*/LEADERBOARD.md")]
    for table in tables:
        for path in table.parent.glob("*.*"):
            shutil.copy(path, job.work.parent / f"{job.work.name}-{path.name}")
    stages = len([*store.glob(f"stages/*/{DONE}")])
    says = "" if complete else "cut off: run it again" if ended.code < 0 else ended.err[-300:]
    row = {"suite": suite, "stages": stages, "seconds": time.monotonic() - began}
    yield {**row, "complete": complete, "says": says.strip(), "ok": complete or ended.code < 0}
