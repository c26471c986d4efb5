"""What a suite needs of a machine, from its file alone: data, weights, a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_forgetting.common.store.packages import PACKAGE

INSIDE = {"digits", "fictitious", "notes", "invented"}
"""Data that come with the packages or are made up on the spot."""
OWN = ("scratch", "tiny")
"""Models that are made here: no hub is needed."""
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
    """Names of data sets, then of weights or their package, then ``a GPU``; nothing needs none."""
    protocol = data.get("protocol", {})
    given, model = protocol.get("data", {}), protocol.get("model", {})
    sources = [source_of(given), *_pretraining_sources(protocol.get("pretrain") or {})]
    probes = [(entry or {}).get("probe", name) for name, entry in data.get("probes", {}).items()]
    sources += ["reasoning"] if "reasoning" in probes else []
    asked = [source for source in dict.fromkeys(sources) if source not in INSIDE]
    if model.get("name") in OWN:
        return [*asked, *(["a GPU"] if model.get("dim", 0) >= WIDE else [])]
    name = str(model.get("name", ""))
    for weights in (name, str(model.get("checkpoint", ""))):
        if weights.startswith(PACKAGE):  # small models, whose suites are sized for a CPU
            return [*asked, weights.removeprefix(PACKAGE)]
    return [*asked, name, "a GPU"]


def _pretraining_sources(pretrain: Mapping[str, Any]) -> list[str]:
    """Data sets of a pretraining; of files the folders that they lie in."""
    data = pretrain.get("data", {})
    files = (data.get("files") or {}).values()
    folders = sorted({path.partition("/")[0] for path in files})
    return folders or ([source_of(data)] if data else [])


def source_of(data: Mapping[str, Any]) -> str:
    """The data set that a suite reads, or ``invented`` where a reader makes its own up."""
    name = str(data.get("name", ""))
    if data.get("invented"):
        return "invented"
    own_texts = {"tdec": "forget", "muse": "corpus"}.get(name)
    if own_texts and data.get(own_texts) in (None, "invented"):
        return "invented"
    return name
