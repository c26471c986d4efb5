"""What the faults meet: a suite of seconds, a model and images of one's own, and the right answers.

Every comparison is with what the same commands made undisturbed: all files below ``stages/``, JSON
without times and without digests of files that hold times.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.models import create_model

from stable_forgetting.benchmarks.cli import main as cli
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.store.weights import save_weights
from tools.faults.child import Child, Ended, Trap, command

SUITE: dict[str, Any] = {
    "suite": "faults",
    "protocol": {
        "data": {"name": "digits", "train_images": 120, "validation_images": 40, "test_images": 40},
        "model": {
            "name": "scratch",
            "image_size": 16,
            "patch_size": 8,
            "dim": 16,
            "depth": 1,
            "heads": 2,
        },
        "scenario": {"kind": "class"},
        "train": {"steps": 9, "epochs": None, "batch_size": 16, "lr": 3e-3, "checkpoint_every": 4},
        "minimum_train_accuracy": 0,
        "evaluation": {"features": ["confidence"]},
    },
    "seeds": [1],
    "retrains": 2,
    "methods": {
        "original": None,
        "retrain": None,
        "gd_sine": {"params": {"steps": 6, "checkpoint_every": 2, "evaluate_every": 2}},
        "unsir": {"params": {"checkpoint_every": 2}},
    },
}
SWEEP: dict[str, Any] = {
    "extends": "suite.yaml",
    "suite": "faults-sweep",
    "rows": ["gd_ball"],
    "methods": {"gd_ball": {}},
    "defaults": {"batch_size": 8},
    "grid": {
        "lrs": [1e-3, 1e-1],
        "lambdas": [0.1, 1.0],
        "steps": [2, 4],
        "block": 3,
        "extend": {"low": 0, "high": 0},
    },
}
_TIMES = frozenset(
    {"created", "seconds", "stage_seconds", "peak_bytes", "sha256", "files", "environment"}
)
"""What may differ: times, memory on a card (whoever goes on reads a checkpoint), digests of files
that hold them, and where a stage was made."""
_TOLD = re.compile(r"\d+(\.\d+)? s on |\d{4}-\d\d-\d\d[T ][\d:.+Z]*( UTC)?|\b[0-9a-f]{64}\b")
"""The same in texts."""
BEFORE = {"run": None, "attack": "run", "sweep": "run", "report": "run", "apply": None}
"""Job -> the one on whose store it begins."""


class World:
    """Files and answers below one folder.

    Args:
        root: The folder, which is not there yet.
        device: Where every job trains.
    """

    def __init__(self, root: Path, device: str = "cpu"):
        self.root, self.device = root, device
        root.mkdir(parents=True)
        self.suite, self.sweep = root / "suite.yaml", root / "sweep.yaml"
        for path, content in ((self.suite, SUITE), (self.sweep, SWEEP)):
            path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
        self._logs = root / "logs"
        self._logs.mkdir()
        self._trial = 0
        _write_subject(root / "subject")
        self._prepare()

    def arguments(self, job: str, place: Path) -> list[object]:
        """The command line of a job on a store, or on the parent of what ``apply`` writes.

        ``report`` is a run whose stages are all there.
        """
        if job == "apply":
            subject = self.root / "subject"
            sets = ["--set", "checkpoint_every=2", "--set", "steps=8", "--set", "batch_size=4"]
            parts = [["--" + part, subject / part] for part in ("model", "forget", "retain")]
            given = [item for pair in parts for item in pair]
            tail = ["--out", place / "out", "--device", self.device]
            return [job, *given, "--method", "gd_sine", *tail, *sets]
        target = self.sweep if job == "sweep" else self.suite
        last = ["--minutes"] if job == "attack" else []
        name = "run" if job in ("report", "sweep") else job
        where = ["--store", place, "--device", self.device, "--workers", 1]
        return [name, target, *where, *last]

    def start(self, job: str, place: Path, **how: Any) -> Child:
        """Starts a job in a process of its own."""
        self._trial += 1
        return command(self._logs / str(self._trial), *self.arguments(job, place), **how)

    def do(self, job: str, place: Path, **how: Any) -> Ended:
        """Runs a job to its end."""
        began = time.monotonic()
        ended = self.start(job, place, **how).wait()
        if ended.code == 0:
            self.seconds[job] = min(self.seconds[job], time.monotonic() - began)
        return ended

    def report(self, store: Path) -> tuple[Ended, dict[str, Any]]:
        """What ``unlearn report --format json`` says, without times; empty where it says no."""
        self._trial += 1
        args = ("report", self.suite, "--store", store, "--format", "json")
        ended = command(self._logs / str(self._trial), *args).wait()
        return ended, _timeless(json.loads(ended.out)) if ended.code == 0 else {}

    def _prepare(self) -> None:
        """Makes every right answer; counts the changes to files of every job.

        What a job imports is imported here afterwards, so that no trial pays for it.
        """
        self.answers: dict[str, dict[str, str]] = {}
        self.changes: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        for job in BEFORE:
            place, noted = self.fresh(job, self.answered(job)), self._logs / f"{job}.json"
            work = _noting(self.arguments(job, place), Trap(place), noted)
            began = time.monotonic()
            ended = Child(self._logs / job, work).wait()
            assert ended.code == 0, (job, ended)
            self.seconds[job] = time.monotonic() - began
            notes = json.loads(noted.read_text())
            self.changes[job], self.answers[job] = notes["changes"], contents(place)
            for name in notes["modules"]:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        self.right_report = self.report(self.answered("run"))[1]

    def answered(self, job: str) -> Path:
        """Where a job was done undisturbed."""
        return self.root / "answers" / job

    def fresh(self, job: str, place: Path) -> Path:
        """Where a job begins: an empty folder, or what the jobs before it left."""
        before = BEFORE[job]
        if before is None:
            place.mkdir(parents=True)
        else:
            shutil.copytree(self.answered(before), place)
        if job == "report":
            for part in ("suites", "tensorboard"):
                shutil.rmtree(place / part)
        return place

    @contextlib.contextmanager
    def place(self, job: str) -> Iterator[Path]:
        """A folder for one trial, gone afterwards."""
        self._trial += 1
        folder = self.root / "trials" / f"{job}-{self._trial}"
        try:
            yield self.fresh(job, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _noting(arguments: list[object], trap: Trap, noted: Path) -> Any:
    def work() -> None:
        trap.arm()
        try:
            run_here(arguments)
        finally:
            notes = {"changes": trap.count, "modules": sorted(sys.modules)}
            noted.write_text(json.dumps(notes))

    return work


def run_here(arguments: list[object]) -> None:
    """The command line in this process; ends with SystemExit."""
    sys.argv = ["unlearn", *map(str, arguments)]
    cli.main()


def contents(place: Path) -> dict[str, str]:
    """Path -> what must not depend on interruptions, of every file of a store or an application."""
    paths = [
        *place.glob("stages/[!.]*/**/*"),
        *place.glob("out/**/*"),
        *place.glob("suites/*/*.json"),
    ]
    return {
        path.relative_to(place).as_posix(): _content(path)
        for path in sorted(paths)
        if path.is_file()
    }


def _content(path: Path) -> str:
    if path.suffix == ".json":
        try:
            return json.dumps(_timeless(json.loads(path.read_bytes())), sort_keys=True)
        except ValueError:
            return "not JSON"
    if path.name == "split.safetensors":  # the order of its metadata is not fixed
        try:
            return ForgetSplit.load(path).digest
        except DataError:
            return "damaged"
    if path.suffix in (".md", ".html"):  # a card and a report name times too
        return _TOLD.sub("", path.read_text(encoding="utf-8", errors="replace"))
    return file_digest(path)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key not in _TIMES}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _write_subject(folder: Path) -> None:
    """A classifier of 2 classes, as timm stores it, and images to forget and to retain."""
    arguments: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_model("vit_tiny_patch16_224", num_classes=2, **arguments)
    (folder / "model").mkdir(parents=True)
    save_weights(model, folder / "model")
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 2,
        "model_args": arguments,
        "label_names": ["a", "b"],
    }
    (folder / "model" / "config.json").write_text(json.dumps(config))
    random = generator(0, "faults")
    for part, count in (("forget", 3), ("retain", 6)):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(0, 256, (16, 16, 3), generator=random).numpy()
                image = Image.fromarray(pixels.astype(np.uint8))
                image.save(folder / part / label / f"{number}.png")
