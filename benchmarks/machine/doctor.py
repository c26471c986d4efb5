"""``unlearn doctor``: is this machine ready, and if not, what mends it?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "note", "bad"]
HUB = "huggingface.co"
CIFAR = ("cifar10", "cifar100")
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


def examine(*, store: Path, data_root: Path | None, timeout: float = 3.0) -> list[Finding]:
    """Looks at everything that a run depends on; changes nothing.

    Args:
        store: Where runs would be written.
        data_root: Where local data should lie.
        timeout: Seconds to wait for the hub.
    """
    return [
        _torch_pair(),
        *_packages(),
        _device(),
        _threads(),
        _disk(store),
        _data(data_root),
        _hub(timeout),
    ]


def _torch_pair() -> Finding:
    """torchvision's compiled operators must match torch."""
    try:
        import torch
        import torchvision
    except Exception as error:
        return Finding(
            "torch + torchvision",
            "bad",
            f"{type(error).__name__}: {error}",
            "install both together: pip install --force-reinstall torch torchvision",
        )
    detail = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    try:
        boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
        torchvision.ops.nms(boxes, torch.ones(1), 0.5)
    except (RuntimeError, AttributeError) as error:
        return Finding(
            "torch + torchvision",
            "bad",
            f"{detail}: {str(error).splitlines()[0]}",
            "not a matched pair: pip install --force-reinstall torch torchvision",
        )
    return Finding("torch + torchvision", "ok", detail + " (operators match)")


def _packages() -> list[Finding]:
    findings = []
    for name in PACKAGES:
        try:
            findings.append(Finding(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "bad", "not installed", f"pip install {name}"))
    return findings


def _device() -> Finding:
    try:
        import torch
    except Exception:
        return Finding("device", "bad", "torch does not import", "see the first line")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Finding(
            "device", "ok", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        )
    return Finding(
        "device",
        "note",
        "CPU only",
        "digits and *-small suites are made for it; the full suites want a GPU",
    )


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = os.environ.get("OMP_NUM_THREADS")
    detail = f"{cores} cores, OMP_NUM_THREADS {wanted or 'unset'}"
    return Finding("threads", "ok", detail + "; each worker process uses --threads (default 1)")


def _disk(store: Path) -> Finding:
    folder = store
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    if not folder.is_dir():
        return Finding("disk", "bad", f"{folder} is not a folder", "choose another --store")
    if not os.access(folder, os.W_OK):
        return Finding("disk", "bad", f"{folder} cannot be written", "choose another --store")
    if free < 2:
        return Finding(
            "disk",
            "bad",
            f"{free:.1f} GiB free at {folder}",
            "free some space, or choose another --store",
        )
    return Finding("disk", "ok", f"{free:.0f} GiB free for {store}")


def _data(root: Path | None) -> Finding:
    if root is None:
        return Finding(
            "data root",
            "note",
            "not given: digits only, or download",
            "--data-root FOLDER with cifar10/ and cifar100/ in hub layout (parquet)",
        )
    if not root.is_dir():
        return Finding("data root", "bad", f"{root} is not a folder", "correct --data-root")
    datasets = [name for name in CIFAR if any((root / name).glob("*.parquet"))]
    if not datasets:
        return Finding(
            "data root",
            "note",
            f"no cifar10/ or cifar100/ parquet in {root}",
            "put hub-layout parquet files there, or let torchvision download",
        )
    return Finding("data root", "ok", f"{root}: {', '.join(datasets)}")


def _hub(timeout: float) -> Finding:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return Finding("model hub", "note", "HF_HUB_OFFLINE=1", "unset it to download weights")
    try:
        socket.create_connection((HUB, 443), timeout=timeout).close()
    except OSError:
        return Finding(
            "model hub",
            "note",
            "not reachable",
            "pretrained suites need it once; or give protocol.model.checkpoint a local "
            "safetensors file. Digits and from-scratch suites do not need it",
        )
    return Finding("model hub", "ok", "reachable")
