"""What a suite needs of a machine, from its file alone: data, weights, a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.protocol.probe import PROBES

INSIDE = {"digits", "fictitious", "notes", "invented"}
"""Data that come with the packages or are made up on the spot."""
SMALL = ("scratch", "tiny")
WIDE = 256
"""Width of a model from scratch from which on two cores are too few."""
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "cifar10": ("cifar10/*.parquet",),
    "cifar100": ("cifar100/*.parquet",),
    "tofu": ("tofu/full.jsonl",),
    "tdec": ("tdec/*",),
    "muse": ("muse/*",),
    "reasoning": ("reasoning/*.jsonl*",),
}
"""Data set -> what a folder of local data holds of it."""


def needs(data: Mapping[str, Any]) -> list[str]:
    """Names of data sets, then of published weights, then ``a GPU``; nothing needs none.

    Args:
        data: What a suite's file says.
    """
    protocol = data.get("protocol", {})
    given, model = protocol.get("data", {}), protocol.get("model", {})
    probes = [PROBES[(own or {}).get("probe", n)] for n, own in data.get("probes", {}).items()]
    reads = any(probe.own_data for probe in probes)
    sources = [source_of(given), *(["reasoning"] if reads else [])]
    asked = [source for source in sources if source not in INSIDE]
    if model.get("name") in SMALL:
        return [*asked, *(["a GPU"] if model.get("dim", 0) >= WIDE else [])]
    return [*asked, str(model.get("name", "")), "a GPU"]


def source_of(data: Mapping[str, Any]) -> str:
    """The data set that a suite reads, or ``invented`` where a reader makes its own up."""
    name = str(data.get("name", ""))
    own_texts = {"tdec": "forget", "muse": "corpus"}.get(name)
    if own_texts and data.get(own_texts) in (None, "invented"):
        return "invented"
    return name


def data_sets(root: Path) -> list[str]:
    """The data sets of which a folder of local data holds something."""
    return [
        name
        for name, patterns in LAYOUTS.items()
        if any(any(root.glob(pattern)) for pattern in patterns)
    ]
