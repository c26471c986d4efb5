"""One application: check everything, unlearn, measure, write all or nothing."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.apply.audit import AUDIT, measured, reading, weight_change
from benchmarks.apply.checkpoint import CONFIG, Checkpoint, build, read_checkpoint
from benchmarks.apply.images import (
    Folder,
    Labels,
    Preprocessing,
    check_disjoint,
    list_folder,
    load_images,
    map_labels,
)
from benchmarks.run import cost_of, dynamics_of, reset_peak
from common.benchmark import pick_device
from common.checkpoints import WEIGHTS, file_digest, save_weights
from common.config import Strict, apply_overrides
from common.errors import CheckpointError, ConfigError, Diverged
from common.methods import UnlearnTask, resolve_config
from common.records import environment
from common.registry import METHODS
from common.schemas import FitConfig
from common.seeding import make_deterministic
from common.splits import ForgetSplit
from common.stages import write_json

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from common.loading import Source

SCHEMA = 1
ADAPTER = "adapter"


@dataclass(frozen=True)
class ApplyRequest:
    """What to unlearn from what, and how.

    Attributes:
        model: Folder with ``model.safetensors`` and ``config.json`` as timm writes them for the
            hub, or a ``.safetensors`` file together with ``arch`` and ``num_classes``.
        forget: Images to forget, in class subfolders.
        method: Registered method.
        out: Folder to make; must not exist or be empty.
        retain: Images to keep, in class subfolders; needed by methods that read them.
        test: Images that the model never saw, in class subfolders; for the audit only.
        preset: Named overrides of the method.
        params: ``key.sub=value`` overrides of the method's config.
        seed: Of the run.
        arch: timm's name, for a bare file.
        num_classes: Number of classes, for a bare file.
        device: Torch device name; ``auto`` takes the first accelerator.
        threads: Torch threads.
    """

    model: Path
    forget: Path
    method: str
    out: Path
    retain: Path | None = None
    test: Path | None = None
    preset: str | None = None
    params: tuple[str, ...] = ()
    seed: int = 0
    arch: str | None = None
    num_classes: int | None = None
    device: str = "auto"
    threads: int = 1


@dataclass(frozen=True)
class AppliedResult:
    """What became of a request.

    Attributes:
        status: ``ok``; or ``diverged``: then ``out`` holds the audit and no model.
        out: The folder that was written.
        audit: The content of ``audit.json``.
        message: One line for people.
    """

    status: str
    out: Path
    audit: Mapping[str, Any]
    message: str


def apply(request: ApplyRequest) -> AppliedResult:
    """Unlearns ``forget`` and writes model, adapter and audit into ``out``, or nothing.

    Images are prepared with timm's evaluation transform for the model, without augmentation, and
    held in memory as uint8 at the model's input size (150 kB each at 224 px).

    Raises:
        UserError: Something in the request can be mended; nothing was written.
    """
    config = _method_config(request)
    _check_out(request.out)
    checkpoint = read_checkpoint(request.model, request.arch, request.num_classes)
    folders = _folders(request)
    _check_access(request, folders)
    check_disjoint(folders)
    device = _device(request.device)
    make_deterministic(request.threads)
    original = build(checkpoint)
    labels = map_labels(checkpoint, folders)
    return _Application(request, config, checkpoint, original, folders, labels, device).run()


# Checks that need no model -----------------------------------------------------------------------


def _method_config(request: ApplyRequest) -> Strict:
    params = apply_overrides({}, request.params)
    return resolve_config(request.method, request.preset, params, origin=request.method)


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty folder; nothing is overwritten")


def _folders(request: ApplyRequest) -> list[Folder]:
    roots = {"forget": request.forget, "retain": request.retain, "test": request.test}
    return [list_folder(root, role) for role, root in roots.items() if root is not None]


def _check_access(request: ApplyRequest, folders: Sequence[Folder]) -> None:
    name, info = request.method, METHODS[request.method].info
    if not info.changes_model:
        raise ConfigError(f"method '{name}' changes nothing; choose one that unlearns")
    if "initial" in info.access:
        raise ConfigError(
            f"method '{name}' trains from the start, which needs the original recipe; choose one "
            "that changes a given model"
        )
    if "retain" in info.access and request.retain is None:
        raise ConfigError(f"method '{name}' reads retain data; give a retain folder")
    scenario = scenario_of(folders)
    reason = info.inapplicable(scenario=scenario or "", modality="vision")
    if reason is not None:
        asked = f"; these folders ask for {scenario} forgetting" if scenario else ""
        raise ConfigError(f"method '{name}' is {reason}{asked}")


def scenario_of(folders: Sequence[Folder]) -> str | None:
    """``class`` if no forgotten class is retained, ``random`` if one is; None without retain."""
    classes = {folder.role: set(folder.classes) for folder in folders}
    if "retain" not in classes:
        return None
    return "random" if classes["forget"] & classes["retain"] else "class"


def _device(name: str) -> torch.device:
    import torch

    name = pick_device(name)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name}: {str(error).splitlines()[0][:120]}") from None
    return device


# The work ----------------------------------------------------------------------------------------


class _GivenSplit(ForgetSplit):
    """Index sets of a user's folders: retain may be absent where the method does not read it."""

    def __post_init__(self) -> None:
        """Folders are disjoint by construction and never empty."""


class _Application:
    """One request being carried out."""

    def __init__(
        self,
        request: ApplyRequest,
        config: Strict,
        checkpoint: Checkpoint,
        original: nn.Module,
        folders: Sequence[Folder],
        labels: Labels,
        device: torch.device,
    ):
        self.request, self.config, self.checkpoint = request, config, checkpoint
        self.folders, self.labels = folders, labels
        self.device = device
        self.prepared_for = Preprocessing.of(original)
        self.original: nn.Module = original.to(self.device).eval()
        self.source, self.parts = load_images(folders, labels, self.prepared_for, self.device)

    def run(self) -> AppliedResult:
        from common.adapters import adapted_layers, adapter_statistics, detach, trainable_share

        audit = self._identity()
        audit["before"] = self._before()
        task = self._task()
        method = METHODS[self.request.method](self.config)
        reset_peak()
        started = time.perf_counter()
        try:
            model: nn.Module = method.unlearn(task)
            audit["cost"] = cost_of(task, time.perf_counter() - started)
            trainable, base = trainable_share(model)
            audit["cost"] |= {"trainable_parameters": trainable, "base_parameters": base}
            adapted = copy.deepcopy(model) if any(True for _ in adapted_layers(model)) else None
            adapters = adapter_statistics(model) if adapted is not None else None
            merged = detach(model)
            self._check_merged(merged)
            audit["after"] = self._measured(merged)
        except Diverged as error:
            return self._diverged(audit, task, time.perf_counter() - started, error)
        audit["dynamics"] = dynamics_of(task)
        audit["weight_change"] = weight_change(self.original, merged, adapters)
        return self._write(audit, merged, adapted)

    def _task(self) -> UnlearnTask:
        from vision.models import TARGETS, component_of

        info = METHODS[self.request.method].info
        split = _GivenSplit("apply", self.parts, self.source.digest)
        source: Source = self.source
        return UnlearnTask(
            model=copy.deepcopy(self.original),
            source=source,
            split=split,
            access=info.access,
            forward=lambda model, batch: model(batch.inputs["x"]),
            recipe=FitConfig(epochs=1),
            num_classes=self.checkpoint.num_classes,
            targets=TARGETS,
            head=("head.*", "fc.*", "classifier.*"),
            component_of=component_of,
            build=_no_fresh_model,
            seed=self.request.seed,
        )

    def _before(self) -> dict[str, Any]:
        try:
            return self._measured(self.original)
        except Diverged as error:
            raise CheckpointError(
                f"{self.checkpoint.weights}: the model's outputs are not finite ({error.reason})"
            ) from None

    def _measured(self, model: nn.Module) -> dict[str, Any]:
        return measured(model, self.source, self.parts, self._forgotten())

    def _forgotten(self) -> np.ndarray:
        import numpy as np

        return np.unique(self.source.labels[self.parts["forget"]])

    def _check_merged(self, model: nn.Module) -> None:
        """What is written must load into the architecture that it came from, and be finite."""
        before, after = self.original.state_dict(), model.state_dict()
        assert list(before) == list(after), "the method changed the architecture"
        for name, tensor in after.items():
            assert tensor.shape == before[name].shape, f"the method changed the shape of {name}"
            if not bool(tensor.isfinite().all()):
                raise Diverged(0, f"parameter {name} is not finite")

    def _diverged(
        self, audit: dict[str, Any], task: UnlearnTask, seconds: float, error: Diverged
    ) -> AppliedResult:
        audit |= {"status": "diverged", "status_detail": str(error), "after": None}
        audit.setdefault("cost", cost_of(task, seconds))
        audit["reading"] = reading(audit)
        with writing(self.request.out) as folder:
            write_json(folder / AUDIT, audit)
        message = (
            f"{self.request.method} {error}; no model was written, only "
            f"{self.request.out / AUDIT}; lower lr or steps and choose another folder"
        )
        return AppliedResult("diverged", self.request.out, audit, message)

    def _write(
        self, audit: dict[str, Any], merged: nn.Module, adapted: nn.Module | None
    ) -> AppliedResult:
        from common.adapters import save_adapter

        out = self.request.out
        with writing(out) as folder:
            save_weights(merged, folder)
            self._write_config(folder / CONFIG)
            if adapted is not None:
                save_adapter(adapted, folder / ADAPTER)
            audit["output"] = {"weights_sha256": file_digest(folder / WEIGHTS)}
            audit["reading"] = reading(audit)
            write_json(folder / AUDIT, audit)
        message = f"wrote {out / WEIGHTS}, {CONFIG} and {AUDIT}"
        return AppliedResult("ok", out, audit, message)

    def _write_config(self, path: Path) -> None:
        source = self.checkpoint.weights.parent / CONFIG
        if self.request.model.is_dir():
            shutil.copyfile(source, path)
        else:
            path.write_text(json.dumps(dict(self.checkpoint.config), indent=1) + "\n")

    def _identity(self) -> dict[str, Any]:
        request, info = self.request, METHODS[self.request.method].info
        return {
            "schema_version": SCHEMA,
            "kind": "apply",
            "status": "ok",
            "status_detail": "",
            "input": {
                "model": request.model.name,
                "weights_sha256": self.checkpoint.digest,
                "architecture": self.checkpoint.architecture,
                "num_classes": self.checkpoint.num_classes,
            },
            "data": {folder.role: self._about(folder) for folder in self.folders},
            "labels": {"origin": self.labels.origin, "ids": dict(self.labels.ids)},
            "preprocessing": self.prepared_for.describe(),
            "scenario": scenario_of(self.folders),
            "method": {
                "name": request.method,
                "version": info.version,
                "paper": info.paper,
                "preset": request.preset,
                "params": self.config.model_dump(mode="json"),
            },
            "seed": request.seed,
            "device": str(self.device),
            "environment": environment(),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _about(self, folder: Folder) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for file in folder.files:
            name = file.split("/")[0]
            counts[name] = counts.get(name, 0) + 1
        return {
            "folder": folder.root.name,
            "images": len(folder.files),
            "classes": counts,
            "digest": folder.digest,
        }


def _no_fresh_model() -> nn.Module:
    raise AssertionError("refused before: no method with access to 'initial' comes here")


@contextlib.contextmanager
def writing(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its place when the block ends without error.

    Raises:
        ConfigError: ``out`` was filled by somebody else in the meantime.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        try:
            os.rename(temporary, out)
        except OSError as error:
            raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
