"""Checkpoints inside a training: all that it changes, in one safetensors file, nothing pickled."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import CheckpointError, named_line
from stable_forgetting.common.base.files import beside, file_digest, json_digest, publish
from stable_forgetting.common.train.sharding import like, whole_tensor
from stable_forgetting.common.train.tracking import read_scalars

if TYPE_CHECKING:
    from stable_forgetting.common.train.protocols import Stateful

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
    """

    step: int = 0
    last: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str | None = None
    beside: dict[str, str] = field(default_factory=dict)


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

        Args:
            path: The file.
            notes: Kept beside the tensors.
            writes: Whether this process writes; all of them must call, to make split tensors whole.
        """
        from safetensors.torch import save_file

        tensors = self._split_tensors()
        if not writes:
            return
        tensors |= self._other_tensors()
        meta = {"identity": self.identity, "notes": json.dumps(asdict(notes))}
        if self.scaler is not None:
            meta["scaler"] = json.dumps(self.scaler.state_dict())
        path.parent.mkdir(parents=True, exist_ok=True)
        copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        temporary = beside(path)
        try:
            save_file(copies, temporary, metadata=meta | {"sha256": _digest(copies, meta)})
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _split_tensors(self) -> dict[str, Tensor]:
        """Parameters and the optimizer's memory of them, made whole."""
        tensors = {f"model.{name}": whole_tensor(p.detach()) for name, p in self.trained.items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{index}.{key}"] = whole_tensor(torch.as_tensor(value))
        return tensors

    def _other_tensors(self) -> dict[str, Tensor]:
        """Buffers, stateful things, random streams."""
        tensors = {f"buffer.{name}": buffer for name, buffer in self.model.named_buffers()}
        for name, item in self.stateful.items():
            tensors |= {f"state.{name}.{key}": value for key, value in item.state().items()}
        tensors["rng"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng_cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def load(self, path: Path) -> Notes:
        """Puts everything back as it was; returns the notes.

        Raises:
            CheckpointError: The file is damaged or of another training; nothing was put back.
        """
        tensors, meta = _read(path)
        if meta.get("identity") != self.identity:
            raise CheckpointError(f"{path}: checkpoint of another run")
        if meta.pop("sha256", None) != _digest(tensors, meta):
            raise CheckpointError(f"{path}: damaged checkpoint")
        notes = Notes(**json.loads(meta["notes"]))
        for name, digest in notes.beside.items():
            if written(path.parent / name, digest.partition(":")[0]) != digest:
                raise CheckpointError(f"{path.parent / name}: not what was written")
        self._restore(tensors)
        if self.scaler is not None and "scaler" in meta:
            self.scaler.load_state_dict(json.loads(meta["scaler"]))
        logger.info("resumed at step %d from %s", notes.step, path)
        return notes

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "buffer": {}, "optimizer": {}}
        states: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            if kind == "state":
                name, _, leaf = rest.rpartition(".")
                states.setdefault(name, {})[leaf] = tensor
            elif kind in groups:
                groups[kind][rest] = tensor
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(like(groups["model"][name], parameter))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(groups["buffer"][name])
        self._restore_optimizer(groups["optimizer"])
        for name, item in self.stateful.items():
            item.load_state(states.get(name, {}))
        torch.set_rng_state(tensors["rng"])
        if "rng_cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng_cuda"], self.device)

    def _restore_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        packed: dict[int, dict[str, Tensor]] = {}
        owners = [p for group in self.optimizer.param_groups for p in group["params"]]
        for key, tensor in tensors.items():
            index, _, leaf = key.partition(".")
            packed.setdefault(int(index), {})[leaf] = like(tensor, owners[int(index)])
        whole = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": packed, "param_groups": whole["param_groups"]})


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


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            # copies: a tensor of this file would die with the file
            tensors = {k: file.get_tensor(k).clone() for k in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged checkpoint ({named_line(error)})") from None
    return tensors, meta


def _digest(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """SHA-256 over names, shapes, types and bytes of tensors, and over what is said beside them."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
