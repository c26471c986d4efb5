"""Checkpoints inside a training: when one is written, what is in it, which one is taken up again.

A checkpoint is one safetensors file, nothing pickled.  Tensors that are split over processes are
never made whole: each process writes and reads its own part, in a folder beside the file.
``torch.distributed.checkpoint`` decides who writes what, and which rows of which file a process
reads, so the number of processes may change.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import CheckpointError
from stable_forgetting.common.base.files import beside, file_digest, json_digest, publish, sync
from stable_forgetting.common.store.hashed import check_hashed, read_metadata, write_hashed
from stable_forgetting.common.train.sharding import like
from stable_forgetting.common.train.tracking import read_scalars

if TYPE_CHECKING:
    from stable_forgetting.common.train.loop import TrainingRun

logger = logging.getLogger(__name__)
_SHARD = "shard-"
_PARTS = ".parts-"
"""Between the name of a checkpoint and the step, in the name of the folder of its parts."""
_TRAINING = ".training-"
"""Between the name of a stage's first checkpoint and the number of a later training."""


@dataclass
class Notes:
    """What a checkpoint says beside its tensors.

    Attributes:
        last: Name -> last value of everything logged.
        peak: Name -> largest value of everything logged.
        seconds: Wall time of all sittings so far.
        stopped: Why the run ended before its time; None where it did not.
        beside: File next to the checkpoint -> digest of what the run had written into it.
        parts: Folder of what was split over processes -> its files, each with its digest; empty
            where nothing was.
    """

    step: int = 0
    last: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str | None = None
    beside: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


def due_at(run: TrainingRun, step: int) -> bool:
    """Whether it is time for a checkpoint after this step; all processes say the same."""
    every = run.config.checkpoint_every
    if isinstance(every, int):
        return (step + 1) % every == 0
    late = time.perf_counter() - run.saved > 60 * float(every.removesuffix("min"))
    return any(processes.gathered(late))


def of_training(path: Path, number: int) -> Path:
    """The checkpoint of one of a stage's trainings, of which the first has the number 0."""
    return path.with_name(f"{path.stem}{_TRAINING}{number}{path.suffix}") if number else path


# Writing -----------------------------------------------------------------------------------------


def save(run: TrainingRun, path: Path, step: int, stopped: str | None = None) -> None:
    """Writes everything needed to continue, atomically, with a digest; all processes must call."""
    last = {name: v for name, v in run.instruments.last.items() if math.isfinite(v)}
    notes = Notes(step, last, run.instruments.peak, run.seconds, stopped)
    writes = run.accelerator.is_main_process
    if writes:
        files = [*path.parent.glob("*.jsonl"), *path.parent.glob("*/*.safetensors")]
        files = [file for file in files if not file.name.startswith(_SHARD)]
        sync({e: None for file in files for e in (file, file.parent, path.parent)})  # before it
        notes.beside = {str(file.relative_to(path.parent)): written(file) for file in files}
    tensors = {f"model.{name}": p.detach() for name, p in run.trained.items()}
    for index, state in run.raw_optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        folder = path.with_name(f"{path.stem}{_PARTS}{step}")
        notes.parts = {folder.name: _save_parts(tensors, folder, first=writes)}
        tensors = {}
    if writes:
        _write(run, path, notes, tensors | _other_tensors(run))
    run.saved = time.perf_counter()


def _save_parts(tensors: dict[str, Tensor], folder: Path, *, first: bool) -> list[tuple[str, str]]:
    """Writes split tensors, and whole ones once; name and digest of every file."""
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    if first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    processes.wait_for_all()
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    checkpoint.save(tensors, storage_writer=writer, process_group=processes.group())
    own = folder.glob(f"{_SHARD}{processes.index() + 1:05d}-*")
    files = processes.gathered([(path.name, f":{file_digest(path)}") for path in own])
    sync([folder, folder.parent])
    return sorted(file for listed in files for file in listed)


def _other_tensors(run: TrainingRun) -> dict[str, Tensor]:
    """Buffers, stateful things, random streams."""
    tensors = {f"buffer.{name}": buffer for name, buffer in run.model.named_buffers()}
    for name, item in run.stateful.items():
        tensors |= {f"state.{name}.{key}": value for key, value in item.state().items()}
    tensors["rng"] = torch.get_rng_state()
    if run.device.type == "cuda":
        tensors["rng_cuda"] = torch.cuda.get_rng_state(run.device)
    return tensors


def _write(run: TrainingRun, path: Path, notes: Notes, tensors: Mapping[str, Tensor]) -> None:
    meta = {"identity": _identity(run), "notes": json.dumps(asdict(notes))}
    if run.accelerator.scaler is not None:
        meta["scaler"] = json.dumps(run.accelerator.scaler.state_dict())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path)
    try:
        write_hashed(temporary, tensors, meta)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _remove_parts(path, notes.parts)


def _identity(run: TrainingRun) -> str:
    """Which training this is; a checkpoint of another one is refused."""
    shapes = {name: list(parameter.shape) for name, parameter in run.trained.items()}
    config = run.config.model_dump(mode="json", exclude={"checkpoint_every"})
    return json.dumps([run.seed, shapes, sorted(run.stateful), config], sort_keys=True)


def _remove_parts(path: Path, kept: Collection[str] = ()) -> None:
    """Removes the folders of a checkpoint's parts, except some."""
    for folder in path.parent.glob(f"{path.stem}{_PARTS}*"):
        if folder.is_dir() and folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def written(path: Path, rows: str = "") -> str:
    """Digest of a file next to a checkpoint; of a log its first ``rows`` rows count.

    A log goes on after the checkpoint, so its digest begins with the number of its rows.
    """
    if not path.is_file():
        return "absent"
    if path.suffix != ".jsonl":
        return f":{file_digest(path)}"
    log = read_scalars(path)[: int(rows) if rows else None]
    return f"{len(log)}:{json_digest({'rows': log})}"


# Resuming ----------------------------------------------------------------------------------------


def resume(run: TrainingRun, path: Path | None) -> tuple[int, str | None]:
    """Loads a checkpoint of this very run if there is one that can be used.

    Returns:
        The next step, and why the run had stopped early, if it had.
    """
    if path is None:
        return 0, None
    notes = Notes()
    if path.is_file():
        try:
            notes = _checked(run, path)
        except CheckpointError as error:
            logger.warning("%s; this training starts again", error)
    if len(set(processes.gathered(notes.step))) > 1:
        notes = Notes()  # some process cannot read its part
    if notes.step:
        restore(run, path, notes)
    elif run.accelerator.is_main_process:
        _forget_later(path)
    run.instruments.last, run.instruments.peak = notes.last, notes.peak
    run.earlier = notes.seconds
    tracker, complete = run.telemetry.tracker, notes.stopped or notes.step == run.total
    if tracker is not None and not complete and run.accelerator.is_main_process:
        tracker.rewind(notes.step)
    return notes.step, notes.stopped


def _checked(run: TrainingRun, path: Path) -> Notes:
    """The notes of a checkpoint that can be used; nothing is put back yet."""
    meta = read_metadata(path)
    if meta.get("identity") != _identity(run):
        raise CheckpointError(f"{path}: checkpoint of another run")
    check_hashed(path)
    notes = Notes(**json.loads(meta["notes"]))
    parts = [(f"{folder}/{n}", d) for folder, files in notes.parts.items() for n, d in files]
    mine = dict(parts[processes.index() :: processes.count()])  # every process checks others
    for name, digest in (notes.beside | mine).items():
        if written(path.parent / name, digest.partition(":")[0]) != digest:
            raise CheckpointError(f"{path.parent / name}: not what was written")
    return notes


def restore(run: TrainingRun, path: Path, notes: Notes) -> None:
    """Puts everything back as it was when a checkpoint was written that was checked."""
    with torch.no_grad(), safe_open(path, framework="pt") as file:
        names = file.keys()
        for folder in notes.parts:
            _set_optimizer(run, _load_parts(run, path.parent / folder))
        if not notes.parts:
            for name, parameter in run.trained.items():
                parameter.copy_(like(file.get_tensor(f"model.{name}"), parameter))
            memory = [key for key in names if key.startswith("optimizer.")]
            _set_optimizer(run, {k: _copied(file.get_tensor(k), _owner(run, k)) for k in memory})
        for name, buffer in run.model.named_buffers():
            buffer.copy_(file.get_tensor(f"buffer.{name}"))
        states: dict[str, dict[str, Tensor]] = {name: {} for name in run.stateful}
        for key in (key for key in names if key.startswith("state.")):
            # names and keys may have dots, as those of parameters do
            name = max((name for name in states if key.startswith(f"state.{name}.")), key=len)
            states[name][key.removeprefix(f"state.{name}.")] = file.get_tensor(key).clone()
        for name, item in run.stateful.items():
            item.load_state(states[name])
        torch.set_rng_state(file.get_tensor("rng").clone())
        if "rng_cuda" in names:
            torch.cuda.set_rng_state(file.get_tensor("rng_cuda").clone(), run.device)
    scaler = read_metadata(path).get("scaler")
    if run.accelerator.scaler is not None and scaler is not None:
        run.accelerator.scaler.load_state_dict(json.loads(scaler))
    logger.info("resumed at step %d from %s", notes.step, path)


def _load_parts(run: TrainingRun, folder: Path) -> dict[str, Tensor]:
    """Fills what is trained from the parts of it; the optimizer's memory, split as it is."""
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    trained = {f"model.{name}": p.detach() for name, p in run.trained.items()}
    memory: dict[str, Tensor] = {}
    found: Any
    for name, found in reader.read_metadata().state_dict_metadata.items():
        if name not in trained:
            owner, dtype = _owner(run, name), found.properties.dtype
            same = owner.shape == found.size
            empty = torch.zeros_like(owner) if same else torch.zeros(found.size)
            memory[name] = empty.to(dtype)
    checkpoint.load({**trained, **memory}, storage_reader=reader, process_group=processes.group())
    return memory


def _copied(tensor: Tensor, owner: Tensor) -> Tensor:
    """A copy of an optimizer's memory, which outlives the file, split as its parameter is.

    It is laid out as the parameter is, too: an optimizer rounds otherwise where layouts differ.
    """
    if isinstance(owner, DTensor) or tensor.shape != owner.shape:
        return like(tensor.clone(), owner)
    return torch.empty_like(owner, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _owner(run: TrainingRun, key: str) -> Tensor:
    """The parameter of which a tensor is the optimizer's memory."""
    owners = [p for group in run.raw_optimizer.param_groups for p in group["params"]]
    owner: Tensor = owners[int(key.split(".")[1])]
    return owner


def _set_optimizer(run: TrainingRun, tensors: Mapping[str, Tensor]) -> None:
    packed: dict[int, dict[str, int | Tensor]] = {}
    for key, tensor in tensors.items():
        _, index, leaf = key.split(".", 2)
        counts = tensor.dim() == 0 and not tensor.is_floating_point()  # steps, of bitsandbytes
        packed.setdefault(int(index), {})[leaf] = int(tensor) if counts else tensor
    groups = run.raw_optimizer.state_dict()["param_groups"]
    run.raw_optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _forget_later(path: Path) -> None:
    """Removes the checkpoints of a stage's later trainings: the log is about to lose their rows."""
    first, _, number = path.stem.partition(_TRAINING)
    own = int(number) if number.isdigit() else 0
    for other in path.parent.glob(f"{first}{_TRAINING}*{path.suffix}"):
        later = other.stem.removeprefix(f"{first}{_TRAINING}")
        if later.isdigit() and int(later) > own:
            other.unlink()
            _remove_parts(other)
