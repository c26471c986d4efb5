"""Adapters as files: weights and config beside them."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Size, Tensor, nn

from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.bounded.attach import _adaptable, attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.bounded.quantised import (
    QuantisedBoundedLinear,
    base_weight,
    layer_shape,
)

ADAPTER_WEIGHTS = "adapter.safetensors"
ADAPTER_CONFIG = "adapter.json"
FACTORS = ("A", "Bt")
START = ("A0", "Bt0")
WHERE = {"placement", "targets", "train_head", "trained"}
"""Fields of a config that say which layers it is for, not how they are computed."""


# Saving and loading ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterState:
    """An adapter as it is written."""

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Writes the tensors as safetensors, plus the JSON config."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.tensors), folder / ADAPTER_WEIGHTS)
        text = json.dumps(self.meta, indent=1, allow_nan=False)
        (folder / ADAPTER_CONFIG).write_text(f"{text}\n")


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Writes :func:`adapter_state` into a folder."""
    adapter_state(model).write(folder)


def adapter_state(model: nn.Module) -> AdapterState:
    """The factors of a model's adapters, copied.

    Every other trainable parameter is with them, and every persistent buffer, as running
    statistics move while an adapter trains.  Nothing of a quantised base is.
    """
    layers = dict(adapted_layers(model))
    assert layers, "nothing is attached"
    stored = {f"{name}.{key}" for name in layers for key in FACTORS}
    stored |= {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, _ in model.named_parameters(remove_duplicate=False)} - stored
    bases = tuple(
        f"{name}.base." for name, la in layers.items() if isinstance(la, QuantisedBoundedLinear)
    )
    tensors = {
        name: value
        for name, value in _tensors(model).items()
        if name not in frozen and not name.startswith(bases)
    }
    copies = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    first = next(iter(layers.values()))
    meta = {
        "format": 1,
        "config": first.config.model_dump(mode="json"),
        "layers": {name: _fingerprint(layer) for name, layer in layers.items()},
        "starts": [name for name, layer in layers.items() if layer.start is not None],
    }
    others = {
        name: layer.config.model_dump(mode="json")
        for name, layer in layers.items()
        if layer.config.model_dump(exclude=WHERE) != first.config.model_dump(exclude=WHERE)
    }
    return AdapterState(copies, {**meta, "configs": others} if others else meta)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without what packed layers put there beside tensors."""
    return {name: v for name, v in model.state_dict().items() if isinstance(v, Tensor)}


def _fingerprint(layer: nn.Module) -> list[float]:
    """[rows, columns, ||W0||_F]: tells whether an adapter meets the weight it was trained on.

    Without the norm for a quantised layer that gives no dense weight.
    """
    weight = base_weight(layer)
    if weight is None:
        return [*layer_shape(layer.base if isinstance(layer, QuantisedBoundedLinear) else layer)]
    return [*weight.shape, round(float(torch.linalg.vector_norm(weight.detach().double())), 6)]


def load_adapter(model: nn.Module, folder: Path) -> list[str]:
    """Attaches a saved adapter to ``model`` in place; the base weights must be the same.

    Raises:
        CheckpointError: Files are missing or damaged, or the model is another one.
    """
    configs, expected, starts, tensors = _read_adapter(folder)
    modules = dict(model.named_modules())
    for name, fingerprint in expected.items():
        layer = modules.get(name)
        if layer is None or not _adaptable(layer):
            raise CheckpointError(f"{folder}: the model has no linear layer '{name}'; wrong model?")
        actual = _fingerprint(layer)
        same = actual[:2] == fingerprint[:2] and len(actual) == len(fingerprint)
        if not same or not math.isclose(actual[-1], fingerprint[-1], rel_tol=1e-4, abs_tol=1e-6):
            raise CheckpointError(
                f"{folder}: layer '{name}' is not the one that this adapter was trained on "
                f"(shape and norm {actual} instead of {fingerprint}); use the same base model"
            )
    factors = _factor_shapes(configs, expected, starts)
    others = {key: value for key, value in tensors.items() if key not in factors}
    shapes = {name: value.shape for name, value in _tensors(model).items()} | factors
    for key in [*factors, *others]:
        if key not in tensors or shapes.get(key) != tensors[key].shape:
            raise CheckpointError(
                f"{folder}: tensor '{key}' is missing or does not fit; wrong model or damaged file"
            )
    trainable = [glob.escape(key) for key in tensors]
    for config in dict.fromkeys(configs.values()):
        targets = [glob.escape(name) for name in expected if configs[name] == config]
        attach(model, targets, config, torch.Generator(), trainable=trainable)
    for name in starts:
        layer = model.get_submodule(name)
        assert isinstance(layer, BoundedLinear)
        layer.set_start_(layer.A, layer.Bt)
    state = _tensors(model)
    with torch.no_grad():  # load_state_dict would ask packed layers for keys that are not here
        for key, value in tensors.items():
            state[key].copy_(value)
    return [*expected]


def _read_adapter(
    folder: Path,
) -> tuple[dict[str, AdapterConfig], dict[str, list[float]], list[str], dict[str, Tensor]]:
    """(layer -> config, layer -> fingerprint, layers with a start, tensors) of a saved adapter."""
    try:
        meta = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        config = validate(AdapterConfig, meta["config"], ADAPTER_CONFIG)
        layers = {name: [float(value) for value in row] for name, row in meta["layers"].items()}
        others = {
            name: validate(AdapterConfig, fields, ADAPTER_CONFIG)
            for name, fields in meta.get("configs", {}).items()
        }
        configs = {name: others.get(name, config) for name in layers}
        if not layers or any(len(row) not in (2, 3) for row in layers.values()):
            raise ValueError("no layers")
        starts = list(meta.get("starts", layers if PHIS[config.phi].start == "random" else []))
        if not set(starts) <= set(layers):
            raise ValueError("starts of other layers")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: no adapter here (missing {error.filename})") from None
    except ConfigError as error:
        raise CheckpointError(
            f"{folder}: damaged adapter, or of a plugin that is not loaded ({error})"
        ) from None
    except (OSError, SafetensorError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{folder}: damaged adapter ({type(error).__name__})") from None
    return configs, layers, starts, tensors


def _factor_shapes(
    configs: Mapping[str, AdapterConfig],
    layers: Mapping[str, Sequence[float]],
    starts: Sequence[str],
) -> dict[str, Size]:
    """Shape of every tensor that the adapted layers themselves need."""
    shapes: dict[str, Size] = {}
    for name, (rows, columns, *_) in layers.items():
        rank = configs[name].rank
        pair = Size([int(rows), rank]), Size([rank, int(columns)])
        for keys in (FACTORS, START) if name in starts else (FACTORS,):
            shapes |= {f"{name}.{key}": shape for key, shape in zip(keys, pair, strict=True)}
    return shapes
