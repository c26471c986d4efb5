"""The arrays that ``salun_peer.json`` is about, and how its numbers were made.

``python tests/golden/make_salun_peer.py CHECKOUT`` runs the peer's evaluation (CHECKOUT is the
``Classification`` folder of Unlearn-Saliency) on arrays that any machine makes bit by bit, and
writes what it says.  Its functions get a model that returns the logits it is given.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
REPOSITORIES = {
    "OPTML-Group/Unlearn-Saliency": "a6e89fd17ff737c24c6aa16c9574469a234ffd91",
    "OPTML-Group/Unlearn-Sparse": "80ba55d36d0871465c2d3e3896db26a98070e065",
}
"""The second's evaluation/SVC_MIA.py is the first's, with a print and another order of imports."""

Part = tuple[np.ndarray, np.ndarray]
ALL = tuple(range(10))
ROWS: dict[str, dict[str, Any]] = {
    "original": {"members": (1000, 9, 3), "nonmembers": (1000, 6, 4), "targets": (1000, 9, 3)},
    "retrained": {"members": (1000, 9, 3), "nonmembers": (1000, 6, 4), "targets": (1000, 6, 4)},
    "saturated": {"members": (1000, 17, 5), "nonmembers": (1000, 11, 7), "targets": (1000, 14, 6)},
    "no_signal": {"members": (1000, 4, 3), "nonmembers": (1000, 4, 3), "targets": (1000, 4, 3)},
    "class": {
        "members": (1000, 9, 3, ALL[:9]),
        "nonmembers": (1000, 6, 4, ALL[:9]),
        "targets": (1000, 4, 4, ALL[9:]),
    },
    "hundred_classes": {
        "members": (1000, 9, 3, range(100)),
        "nonmembers": (1000, 6, 4, range(100)),
        "targets": (1000, 7, 4, range(100)),
    },
    "large": {"members": (5000, 12, 4), "nonmembers": (5000, 8, 5), "targets": (2000, 10, 4)},
}
"""Case -> part -> samples, mean and deviation of the true logit, and classes (ten by default)."""

RETAIN, TEST = 4000, 1000
PER_SAMPLE = 8
SHOWN = {"confidence": "conf", "entropy": "entr", "modified_entropy": "m_entr"}


def uniform(count: int, name: str) -> np.ndarray:
    """(count,) float64 in [0, 1): splitmix64 in integers, the same everywhere."""
    start = int.from_bytes(name.encode()[-7:], "big")
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(start << 8)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bell(count: int, name: str) -> np.ndarray:
    """(count,) about standard normal: four uniforms, mean 0, variance 1."""
    return (uniform(4 * count, name).reshape(count, 4).sum(1) - 2.0) * 1.75


def rows(name: str, count: int, mean: float, std: float, classes: Any = ALL) -> Part:
    """((N, C) float32, (N,) int64): logits, exact and without ties, and labels, classes in turn."""
    labels = np.asarray(classes, dtype=np.int64)[np.arange(count) % len(classes)]
    width = max(10, len(classes))
    logits = 1.5 * bell(count * width, f"{name}.noise").reshape(count, width)
    logits[np.arange(count), labels] += mean + std * bell(count, f"{name}.true")
    exact = np.round(64 * logits) / 64 + np.arange(width) * 2.0**-14
    return exact.astype(np.float32), labels


def case(name: str) -> dict[str, Part]:
    """Part -> logits and labels of one of :data:`ROWS`."""
    return {part: rows(f"{name[:3]}{part[:2]}", *spec) for part, spec in ROWS[name].items()}


def sorted_retain() -> dict[str, Part]:
    """A retain set in the order of its classes, each better known than the one before."""
    logits, labels = rows("retain", RETAIN, 4, 3)
    order = np.argsort(labels, kind="stable")
    logits, labels = logits[order], labels[order]
    logits[np.arange(RETAIN), labels] += labels.astype(np.float32)
    return {
        "retain": (logits, labels),
        "test": rows("test", TEST, 6, 4),
        "forget": rows("forget", TEST, 7, 4),
    }


# What the peer says ------------------------------------------------------------------------------


class Peer:
    """The peer's modules, with what they import but do not use replaced."""

    def __init__(self, folder: Path):
        sys.path.insert(0, str(folder))
        sys.modules["imagenet"] = types.ModuleType("imagenet")
        sys.modules["imagenet"].get_x_y_from_data_dict = None  # type: ignore[attr-defined]
        self.svc, self.mia = (
            _module(folder / "evaluation" / f"{name}.py") for name in ("SVC_MIA", "MIA")
        )
        self.plain_svc = self.svc.SVC

    def attack(self, parts: dict[str, Part], tol: float = 1e-3) -> dict[str, float]:
        """Its five efficacies in percent; ``trained`` are targets that it calls members."""
        self.svc.SVC = partial(self.plain_svc, tol=tol)
        loaders = {name: _batches(part) for name, part in parts.items()}
        found = self.svc.SVC_MIA(
            shadow_train=loaders["members"],
            shadow_test=loaders["nonmembers"],
            target_train=loaders.get("trained"),
            target_test=loaders["targets"],
            model=_echo(),
        )
        return {name: 100.0 * float(value) for name, value in found.items()}

    def features(self, part: Part) -> dict[str, dict[str, list[float]]]:
        """Feature -> what both of its files make of the first samples."""
        import torch

        logits, labels = (torch.from_numpy(array) for array in part)
        probs = logits.softmax(1)
        box = self.mia.black_box_benchmarks(*[(probs.numpy(), labels.numpy())] * 4, num_classes=10)
        found = {
            "MIA.py": {k: getattr(box, f"t_tr_{v}").reshape(-1) for k, v in SHOWN.items()},
            "SVC_MIA.py": {
                "entropy": self.svc.entropy(probs).numpy(),
                "modified_entropy": self.svc.m_entropy(probs, labels).numpy(),
            },
        }
        return {
            file: {k: [float(x) for x in v[:PER_SAMPLE]] for k, v in values.items()}
            for file, values in found.items()
        }

    def accuracy(self, folder: Path, part: Part) -> float:
        """Top-1 in percent: its ``accuracy`` of every batch, averaged by its ``AverageMeter``."""
        names: dict[str, Any] = {}
        source = (folder / "utils.py").read_text(encoding="utf-8")
        for start in ("class AverageMeter", "def accuracy"):
            body = source[source.index(start) :]
            ends = [at for at in (body.find("\ndef ", 1), body.find("\nclass ", 1)) if at > 0]
            exec(body[: min(ends)], names)
        meter = names["AverageMeter"]()
        for logits, labels in _batches(part):
            meter.update(names["accuracy"](logits, labels)[0].item(), len(labels))
        return float(meter.avg)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batches(part: Part, size: int = 256) -> list[Any]:
    import torch

    logits, labels = (torch.from_numpy(array) for array in part)
    return list(zip(logits.split(size), labels.split(size), strict=True))


def _echo() -> Any:
    from torch import nn

    model = nn.Identity()
    model.register_parameter("device", nn.Parameter())
    return model


def main(folder: Path) -> None:
    """Writes ``salun_peer.json``."""
    peer = Peer(folder)
    cases: dict[str, Any] = {}
    for name in ROWS:
        parts = case(name)
        cases[name] = {
            "mia": peer.attack(parts),
            "accuracy": {part: peer.accuracy(folder, values) for part, values in parts.items()},
        }
        if name != "large":
            cases[name]["mia_tol_1e-6"] = peer.attack(parts, tol=1e-6)
    parts = case("original")
    both = parts | {"trained": case("retrained")["targets"]}
    ordered = sorted_retain()
    outside = {"nonmembers": ordered["test"], "targets": ordered["forget"]}
    first = tuple(array[:TEST] for array in ordered["retain"])
    even = tuple(array[:: RETAIN // TEST] for array in ordered["retain"])
    packages = ("numpy", "scikit-learn", "torch")
    found = {
        "made_by": {
            "repositories": REPOSITORIES,
            "packages": {name: importlib.metadata.version(name) for name in packages},
            "again": "python tests/golden/make_salun_peer.py CHECKOUT/Classification",
        },
        "cases": cases,
        "two_targets": peer.attack(both),
        "features": {name: peer.features(case(name)["targets"]) for name in ("original", "class")},
        "sorted_retain": {
            "first": peer.attack({"members": first, **outside}),
            "even": peer.attack({"members": even, **outside}),
        },
    }
    text = json.dumps(found, indent=1, allow_nan=False)
    (HERE / "salun_peer.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
