"""Checkpoints inside a training: all that it changes, in one safetensors file, nothing pickled."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from stable_forgetting.common.base.errors import CheckpointError
from stable_forgetting.common.base.files import beside, file_digest, json_digest, publish
from stable_forgetting.common.store.hashed import check_hashed, read_metadata, write_hashed
from stable_forgetting.common.train.parts import (
    is_split,
    load_parts,
    own_share,
    remove_parts,
    save_parts,
)
from stable_forgetting.common.train.protocols import Stateful
from stable_forgetting.common.train.sharding import like
from stable_forgetting.common.train.tracking import read_scalars

logger = logging.getLogger(__name__)


@dataclass
class Notes:
    """What a checkpoint says beside its tensors.

    Attributes:
        step: Steps that are done.
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


@dataclass(frozen=True)
class TrainingState:
    """What a training changes, where it lies.

    Attributes:
        model: Its buffers are kept.
        trained: Name -> parameter that is trained, possibly split over processes.
        optimizer: Of these parameters.
        stateful: Further things that advance with training, such as loaders.
        device: Whose random stream is kept beside the CPU's.
        scaler: Of float16 losses, if there is one.
        identity: Which training this is; a checkpoint of another one is refused.
    """

    model: nn.Module
    trained: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    stateful: Mapping[str, Stateful]
    device: torch.device
    scaler: Any | None
    identity: str

    def save(self, path: Path, notes: Notes, *, writes: bool = True) -> None:
        """Writes everything needed to continue, atomically, with a digest of it.

        Tensors that are split over processes are never made whole: each process writes its part of
        them into a folder beside the file, which names that folder.

        Args:
            path: The file.
            notes: Kept beside the tensors.
            writes: Whether this process writes the file; all of them must call.
        """
        tensors = {f"model.{name}": p.detach() for name, p in self.trained.items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
        if any(map(is_split, tensors.values())):
            folder = path.with_suffix(f".{notes.step}")
            notes.parts = {folder.name: save_parts(tensors, folder, first=writes)}
            tensors = {}
        if writes:
            self._write(path, notes, tensors | self._other_tensors())

    def _write(self, path: Path, notes: Notes, tensors: Mapping[str, Tensor]) -> None:
        meta = {"identity": self.identity, "notes": json.dumps(asdict(notes))}
        if self.scaler is not None:
            meta["scaler"] = json.dumps(self.scaler.state_dict())
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = beside(path)
        try:
            write_hashed(temporary, tensors, meta)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        remove_parts(path, notes.parts)

    def _other_tensors(self) -> dict[str, Tensor]:
        """Buffers, stateful things, random streams."""
        tensors = {f"buffer.{name}": buffer for name, buffer in self.model.named_buffers()}
        for name, item in self.stateful.items():
            tensors |= {f"state.{name}.{key}": value for key, value in item.state().items()}
        tensors["rng"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng_cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def check(self, path: Path) -> Notes:
        """The notes of a checkpoint that can be used; nothing is put back yet.

        Raises:
            CheckpointError: The file is damaged or of another training.
        """
        meta = read_metadata(path)
        if meta.get("identity") != self.identity:
            raise CheckpointError(f"{path}: checkpoint of another run")
        check_hashed(path)
        notes = Notes(**json.loads(meta["notes"]))
        parts = {f"{folder}/{n}": d for folder, files in notes.parts.items() for n, d in files}
        for name, digest in (notes.beside | own_share(parts)).items():
            if written(path.parent / name, digest.partition(":")[0]) != digest:
                raise CheckpointError(f"{path.parent / name}: not what was written")
        return notes

    def restore(self, path: Path, notes: Notes) -> None:
        """Puts everything back as it was when a checkpoint was written that was checked."""
        with torch.no_grad(), safe_open(path, framework="pt") as file:
            names = file.keys()
            for folder in notes.parts:
                self._restore_parts(path.parent / folder)
            if not notes.parts:
                self._restore_whole(file)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(file.get_tensor(f"buffer.{name}"))
            states: dict[str, dict[str, Tensor]] = {}
            for key in (key for key in names if key.startswith("state.")):
                name, _, leaf = key.removeprefix("state.").rpartition(".")
                states.setdefault(name, {})[leaf] = file.get_tensor(key).clone()
            for name, item in self.stateful.items():
                item.load_state(states.get(name, {}))
            torch.set_rng_state(file.get_tensor("rng").clone())
            if "rng_cuda" in names:
                torch.cuda.set_rng_state(file.get_tensor("rng_cuda").clone(), self.device)
        scaler = read_metadata(path).get("scaler")
        if self.scaler is not None and scaler is not None:
            self.scaler.load_state_dict(json.loads(scaler))
        logger.info("resumed at step %d from %s", notes.step, path)

    def _restore_whole(self, file: Any) -> None:
        """Parameters and the optimizer's memory of them, from whole tensors."""
        for name, parameter in self.trained.items():
            parameter.copy_(like(file.get_tensor(f"model.{name}"), parameter))
        states = [key for key in file.keys() if key.startswith("optimizer.")]  # noqa: SIM118
        owner = self._owner
        # copies: a tensor of this file would die with the file
        self._set_optimizer({k: like(file.get_tensor(k).clone(), owner(k)) for k in states})

    def _restore_parts(self, folder: Path) -> None:
        """The same from the parts that processes wrote, however many there were."""
        tensors = {f"model.{name}": p.detach() for name, p in self.trained.items()}
        states = load_parts(tensors, folder, self._owner)
        self._set_optimizer(states)

    def _owner(self, key: str) -> Tensor:
        """The parameter of which a tensor is the optimizer's memory."""
        owners = [p for group in self.optimizer.param_groups for p in group["params"]]
        owner: Tensor = owners[int(key.split(".")[1])]
        return owner

    def _set_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        packed: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            _, index, leaf = key.split(".", 2)
            packed.setdefault(int(index), {})[leaf] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": packed, "param_groups": groups})


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
