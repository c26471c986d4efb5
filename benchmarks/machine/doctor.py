"""``unlearn doctor``: is this machine ready, and if not, what mends it?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stable_forgetting.benchmarks.suite.needs import LAYOUTS
from stable_forgetting.common.store.stages import StageStore

Verdict = Literal["ok", "note", "bad"]
Answer = tuple[Verdict, str, str]
"""Verdict, detail, mend."""
HUB = "huggingface.co"
PACKAGES = (
    "timm",
    "transformers",
    "accelerate",
    "scikit-learn",
    "datasets",
    "lm-eval",
    "optuna",
)


@dataclass(frozen=True)
class Finding:
    """One checked thing; ``mend`` says what to do unless it is ok."""

    name: str
    verdict: Verdict
    detail: str
    mend: str = ""


def examine(*, store: Path, data_root: Path | None) -> list[Finding]:
    """Looks at everything that a run depends on; sets damaged stages of the store aside."""
    answers = {
        "torch + torchvision": _torch_pair(),
        **{name: _package(name) for name in PACKAGES},
        "device": _device(),
        "threads": _threads(),
        "disk": _disk(store),
        "data root": _data(data_root),
        "model hub": _hub(),
    }
    findings = [Finding(name, *answer) for name, answer in answers.items()]
    return [*findings, *_stages(store)]


def _torch_pair() -> Answer:
    """torchvision's compiled operators must match torch."""
    try:
        import torch
        import torchvision
    except Exception as error:
        mend = "install both together: pip install --force-reinstall torch torchvision"
        return "bad", f"{type(error).__name__}: {error}", mend
    detail = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    try:
        boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
        torchvision.ops.nms(boxes, torch.ones(1), 0.5)
    except (RuntimeError, AttributeError) as error:
        mend = "not a matched pair: pip install --force-reinstall torch torchvision"
        return "bad", f"{detail}: {str(error).splitlines()[0]}", mend
    return "ok", f"{detail} (operators match)", ""


def _package(name: str) -> Answer:
    try:
        return "ok", importlib.metadata.version(name), ""
    except importlib.metadata.PackageNotFoundError:
        return "bad", "not installed", f"pip install {name}"


def _device() -> Answer:
    try:
        import torch
    except Exception:
        return "bad", "torch does not import", "see the first line"
    if torch.cuda.is_available():
        free, total = (count / 2**30 for count in torch.cuda.mem_get_info())
        return "ok", f"{torch.cuda.get_device_name()}, {free:.0f} of {total:.0f} GiB free", ""
    mend = "digits and *-small suites are made for it; the full suites want a GPU"
    return "note", "CPU only", mend


def _threads() -> Answer:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = os.environ.get("OMP_NUM_THREADS") or "unset"
    each = "each worker process uses --threads (default 1)"
    return "ok", f"{cores} cores, OMP_NUM_THREADS {asked}; {each}", ""


def _disk(store: Path) -> Answer:
    folder = store
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    mend = "choose another --store"
    if not folder.is_dir():
        return "bad", f"{folder} is not a folder", mend
    if not os.access(folder, os.W_OK):
        return "bad", f"{folder} cannot be written", mend
    if free < 2:
        return "bad", f"{free:.1f} GiB free at {folder}", f"free some space, or {mend}"
    return "ok", f"{free:.0f} GiB free for {store}", ""


def _stages(store: Path) -> list[Finding]:
    """Compares every file of a store with its digest."""
    damages = [damage for _, damage in StageStore(store).verify()]
    unchecked = damages.count("unchecked")
    findings = [Finding("store", "bad", text) for text in damages if text not in ("", "unchecked")]
    if not damages or findings:
        return findings
    detail = f"{len(damages)} stages in {store}, every file as it was written"
    if unchecked:
        detail += f", but for {unchecked} from before digests were kept"
    return [Finding("store", "ok", detail)]


def _data(root: Path | None) -> Answer:
    places = ", ".join(pattern for patterns in LAYOUTS.values() for pattern in patterns)
    if root is None:
        mend = f"--data-root FOLDER with any of {places}"
        return "note", "not given: digits and invented texts only, or download", mend
    if not root.is_dir():
        return "bad", f"{root} is not a folder", "correct --data-root"
    present = [name for name, of in LAYOUTS.items() if any(any(root.glob(each)) for each in of)]
    absent = [name for name in LAYOUTS if name not in present]
    if not present:
        return "note", f"no data set in {root}", f"put any of these there: {places}"
    return "ok", f"{root}: {', '.join(present)}; not there: {', '.join(absent) or 'none'}", ""


def _hub() -> Answer:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return "note", "HF_HUB_OFFLINE=1", "unset it to download weights"
    try:
        socket.create_connection((HUB, 443), timeout=3.0).close()
    except OSError:
        mend = (
            "pretrained suites need it once; or give protocol.model.checkpoint a local "
            "safetensors file. Digits and from-scratch suites do not need it"
        )
        return "note", "not reachable", mend
    return "ok", "reachable", ""
