"""What a cell has reached, in a file beside its results: the next command goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stable_forgetting.common.base.files import beside, publish
from stable_forgetting.common.store.hashed import check_hashed, read_metadata, write_hashed


class Checkpoint:
    """The trained weights of a model and the state of its optimizer.

    Args:
        path: The safetensors file; it need not exist.
        model: Its parameters with a gradient are kept.
        optimizer: Trains them.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.path, self.optimizer = path, optimizer
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def save(self, notes: dict[str, Any]) -> None:
        """Writes the file anew, with ``notes`` (plain JSON) beside the tensors."""
        states = self.optimizer.state_dict()["state"].items()
        tensors = {f"state.{at}.{key}": t for at, state in states for key, t in state.items()}
        temporary = beside(self.path)
        write_hashed(temporary, {**self.weights, **tensors}, {"notes": json.dumps(notes)})
        publish(temporary, self.path)

    @torch.no_grad()
    def load(self) -> dict[str, Any]:
        """Puts back what was saved; the notes, or {} where nothing was."""
        from safetensors.torch import load_file

        if not self.path.exists():
            return {}
        check_hashed(self.path)
        tensors = load_file(self.path)
        for name, parameter in self.weights.items():
            parameter.copy_(tensors.pop(name))
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            _, at, key = name.split(".", 2)
            states.setdefault(int(at), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        notes: dict[str, Any] = json.loads(read_metadata(self.path)["notes"])
        return notes
