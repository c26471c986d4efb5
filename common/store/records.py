"""What one evaluated model measured, as one strict JSON document.

A record holds measurements only; gaps, means and ranks are derived when a table is made.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import write_json

SCHEMA = 1
RECORD = "record.json"
"""Its file in a stage's folder."""
PACKAGES = (
    "stable-forgetting",
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "accelerate",
    "scikit-learn",
    "numpy",
    "scipy",
    "safetensors",
    "optuna",
)


class RunRecord(BaseModel):
    """One model, evaluated once.

    Attributes:
        status: ``ok``, or ``diverged`` (all metrics are then null).
        status_detail: Where and how it diverged.
        metrics: Metric name -> number; undefined is null.
        dynamics: Last and largest values of what training logged.
        cost: Seconds, steps, trainable and base parameters, peak bytes.
        stopped: What ended training before its time; empty where nothing did.
        split: Digest, name and notes of the index sets.
        data: Digest and provenance of the data; ``trained_on: assumed`` where the published model
            that this one is, or comes from, does not say what it was trained on; ``pretrained``:
            of the pretraining that this one comes from, data and held-out accuracy in words.
        stages: Role -> stage key, back to the data.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    schema_version: int = SCHEMA
    status: Literal["ok", "diverged"]
    status_detail: str = ""
    benchmark: str
    benchmark_version: int
    protocol: dict[str, Any]
    method: str
    method_version: int
    params: dict[str, Any]
    seed: int
    replicate: int = 0
    trial: bool = False
    metrics: dict[str, float | None]
    dynamics: dict[str, float | None] = {}
    cost: dict[str, float | None] = {}
    stopped: str = ""
    split: dict[str, str] = {}
    data: dict[str, str] = {}
    stages: dict[str, str] = {}
    environment: dict[str, Any] = {}
    created: str = ""

    @field_validator("params")
    @classmethod
    def _of_an_earlier_version(cls, params: dict[str, Any]) -> dict[str, Any]:
        # gradient difference and DeLoRA called their forget weight lam
        names = {"lam": "forget_weight"} if "forget_loss" in params else {}
        return {names.get(key, key): value for key, value in params.items()}

    def save(self, path: Path) -> None:
        """Writes the record."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Reads a record of this or an older schema."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"{path}: no such record") from None
        except (ValidationError, UnicodeDecodeError) as error:
            first = str(error).splitlines()[0]
            raise DataError(f"{path}: not a valid record ({first}); delete it and rerun") from None


def clean_metrics(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Plain floats; NaN and infinities become null."""
    return {
        name: None if value is None or not math.isfinite(value) else float(value)
        for name, value in values.items()
    }


@functools.cache
def environment() -> dict[str, Any]:
    """Python, platform, processor, packages, and the git state of *this* package's own tree."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "processes": processes.count(),
        "packages": versions,
        "git": git_state(Path(__file__).resolve().parent),
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name, family and model of the processor, for its kind moves the last digits of results."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in lines)
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    wanted = {"model name": "", "cpu family": "family ", "model": "model "}
    known = [f"{word}{facts[key]}" for key, word in wanted.items() if facts.get(key)]
    return ", ".join(known) or platform.machine()


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and dirty flag of the tree that holds ``folder``; empty when it is not tracked."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *args],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", "records.py") is None:
        return {}
    commit = git("rev-parse", "HEAD")
    dirty = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(dirty)} if commit else {}
