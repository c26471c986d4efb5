"""A user's timm checkpoint: found, checked, built.  Nothing pickled is ever read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.base.config import did_you_mean
from common.base.errors import CheckpointError, ConfigError
from common.base.files import file_digest
from common.store.weights import CONFIG, WEIGHTS, refuse_pickles

if TYPE_CHECKING:
    from torch import nn

_RESERVED = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)
_RESERVED_HINT = "a checkpoint brings its weights itself"


@dataclass(frozen=True)
class Checkpoint:
    """A timm model on disk, not yet read.

    Attributes:
        weights: The safetensors file.
        config: What ``config.json`` says (or would say, for a bare file).
        label_names: Names of the classes by id, if they are known.
    """

    weights: Path
    config: Mapping[str, Any]
    label_names: tuple[str, ...] | None

    @property
    def architecture(self) -> str:
        """timm's name."""
        return self.config["architecture"]

    @property
    def num_classes(self) -> int:
        """Width of the logits."""
        return self.config["num_classes"]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights file."""
        return file_digest(self.weights)


def read_checkpoint(path: Path, arch: str | None, num_classes: int | None) -> Checkpoint:
    """Finds the weights and what they belong to.

    Args:
        path: A folder with ``model.safetensors`` and ``config.json`` as timm writes them for the
            hub, or a ``.safetensors`` file.
        arch: timm's name, for a bare file.
        num_classes: Number of classes, for a bare file.

    Raises:
        CheckpointError: Something is missing, pickled or malformed.
        ConfigError: ``arch`` and ``num_classes`` are given for a folder, or missing for a file.
    """
    if path.is_dir():
        if arch is not None or num_classes is not None:
            raise ConfigError(
                f"{path}: its {CONFIG} names the architecture; leave out arch and "
                "num_classes, or give the .safetensors file itself"
            )
        return _read_folder(path)
    refuse_pickles(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such folder or .safetensors file")
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: not a .safetensors file, nor a folder with {WEIGHTS}")
    if arch is None or num_classes is None:
        raise ConfigError(
            f"{path}: a bare file needs arch and num_classes; or give a folder with "
            f"{WEIGHTS} and {CONFIG}"
        )
    return _checked(path, {"architecture": arch, "num_classes": num_classes}, "arch")


def _read_folder(folder: Path) -> Checkpoint:
    weights, config = folder / WEIGHTS, folder / CONFIG
    if not weights.is_file():
        for other in sorted(folder.iterdir()):
            refuse_pickles(other)
        raise CheckpointError(f"{folder}: holds no {WEIGHTS}")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: holds no {CONFIG}; add it, or give the file with arch and num_classes"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{config}: must be a mapping")
    nested = content.get("pretrained_cfg")
    if "num_classes" not in content and isinstance(nested, dict) and "num_classes" in nested:
        content["num_classes"] = nested["num_classes"]
    return _checked(weights, content, str(config))


def _checked(weights: Path, config: Mapping[str, Any], origin: str) -> Checkpoint:
    """Checks the types of what is read from a config; its values meet the weights later."""
    if not isinstance(config.get("architecture"), str):
        raise CheckpointError(f"{origin}: 'architecture' must be a timm name")
    classes = config.get("num_classes")
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 2:
        raise CheckpointError(f"{origin}: num_classes must be a whole number from 2, not {classes}")
    for key in ("model_args", "pretrained_cfg"):
        if not isinstance(config.get(key) or {}, dict):
            raise CheckpointError(f"{origin}: '{key}' must be a mapping")
    refused = sorted(_RESERVED & (config.get("model_args") or {}).keys())
    if refused:
        raise CheckpointError(f"{origin}: model_args may not set '{refused[0]}': {_RESERVED_HINT}")
    names = _label_names(config.get("label_names"), classes, origin)
    return Checkpoint(weights, config, names)


def _label_names(names: Any, num_classes: int, origin: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, dict):
        ordered = [names.get(str(label)) for label in range(num_classes)]
        names = ordered if len(names) == num_classes else list(names.values())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{origin}: label_names must be a list of names, or id: name")
    if len(names) != num_classes or len(set(names)) != num_classes:
        raise CheckpointError(
            f"{origin}: label_names holds {len(set(names))} names for {num_classes} classes"
        )
    return tuple(names)


def build(checkpoint: Checkpoint) -> nn.Module:
    """The model with its weights, on the CPU, in float32.

    Raises:
        CheckpointError: timm cannot build it, or the weights do not fit or are not finite.
    """
    from timm.models import create_model, is_model, list_models

    from vision.models.checkpoint import load_checkpoint

    name = checkpoint.architecture
    if not is_model(name):
        hint = did_you_mean(name, list_models()) if name else ""
        hint = hint if "did you mean" in hint else ""
        raise CheckpointError(f"{checkpoint.weights}: timm knows no architecture '{name}'{hint}")
    arguments = {**(checkpoint.config.get("model_args") or {})}
    arguments["num_classes"] = checkpoint.num_classes
    try:
        model = create_model(
            name,
            pretrained=False,
            pretrained_cfg=checkpoint.config.get("pretrained_cfg") or None,
            **arguments,
        )
    except Exception as error:  # whatever a model's constructor makes of foreign arguments
        text = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"{checkpoint.weights}: timm cannot build {name} from its config ({text})"
        ) from None
    _check_width(model, checkpoint)
    load_checkpoint(model, checkpoint.weights)
    return model


def _check_width(model: nn.Module, checkpoint: Checkpoint) -> None:
    """A wrong number of classes deserves a message of its own."""
    from safetensors import SafetensorError, safe_open

    classifier: Any = getattr(model, "get_classifier", lambda: None)()
    keys = [f"{name}.bias" for name, module in model.named_modules() if module is classifier]
    try:
        with safe_open(checkpoint.weights, framework="pt") as file:
            stored = set(file.keys())
            widths = [file.get_slice(key).get_shape()[0] for key in keys if key in stored]
    except (SafetensorError, OSError, IndexError):
        return  # loading says what is wrong with it
    if widths and widths[0] != checkpoint.num_classes:
        raise CheckpointError(
            f"{checkpoint.weights}: its classifier has {widths[0]} classes, not num_classes "
            f"{checkpoint.num_classes}"
        )
