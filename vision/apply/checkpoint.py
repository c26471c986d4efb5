"""A user's timm checkpoint: found, checked, built, written.  Nothing pickled is ever read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, one_line
from stable_forgetting.common.base.files import file_digest
from stable_forgetting.common.base.hub import fetch, is_repository, parsed
from stable_forgetting.common.store.adapters import (
    ADAPTER_WEIGHTS,
    base_of,
    is_adapter,
    read_base,
    with_adapter,
)
from stable_forgetting.common.store.weights import (
    CONFIG,
    WEIGHTS,
    in_types,
    keep_metadata,
    refuse_pickles,
    refuse_wrapped,
    save_weights,
    stored,
)
from stable_forgetting.vision.apply.sizes import (
    POSITIONS,
    PREPARATION,
    cfg_of,
    check_architecture,
    classifier_key,
    inferred_config,
    stored_image_size,
    with_image_size,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

_RESERVED = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)
_RESERVED_HINT = "a checkpoint brings its weights itself"
_FETCHED = (WEIGHTS, CONFIG, "LICENSE*")


@dataclass(frozen=True)
class Checkpoint:
    """A timm model on disk, not yet read.

    Attributes:
        weights: The safetensors file.
        config: What ``config.json`` says (or would say, for a bare file).
        label_names: Names of the classes by id, if they are known.
        folder: What holds weights and config; None for a bare file.
        repository: OWNER/NAME, of a model from the hub; its folder is called as the commit.
        adapter: Folder of a PEFT adapter that is merged into the model.
    """

    weights: Path
    config: Mapping[str, Any]
    label_names: tuple[str, ...] | None
    folder: Path | None = None
    repository: str | None = None
    adapter: Path | None = None

    @property
    def name(self) -> str:
        """Of the repository, the folder or the file."""
        return self.repository or (self.adapter or self.folder or self.weights).name

    @property
    def revision(self) -> str | None:
        """Commit of a model from the hub."""
        return self.weights.parent.name if self.repository else None

    @property
    def architecture(self) -> str:
        """timm's name."""
        return self.config["architecture"]

    @property
    def num_classes(self) -> int:
        """Width of the logits."""
        return self.config["num_classes"]

    @cached_property
    def digest(self) -> str | dict[str, str]:
        """SHA-256 of the weights file; of an adapter, by the names of both files."""
        if self.adapter is None:
            return file_digest(self.weights)
        files = (self.weights, self.adapter / ADAPTER_WEIGHTS)
        return {file.name: file_digest(file) for file in files}

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Name -> shape of what is stored; empty where that cannot be read."""
        return {name: shape for name, (shape, _) in self._stored.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> type of each tensor that is stored in half precision."""
        import torch

        known = {"F16": torch.float16, "BF16": torch.bfloat16}
        return {name: known[kind] for name, (_, kind) in self._stored.items() if kind in known}

    @cached_property
    def _stored(self) -> dict[str, tuple[list[int], str]]:
        return stored(self.weights)

    def load(self) -> nn.Module:
        """The model with its weights, on the CPU, in float32.

        Raises:
            CheckpointError: timm cannot build it, or the weights do not fit or are not finite.
        """
        from timm.models import create_model

        from stable_forgetting.vision.models.checkpoint import load_checkpoint

        name = self.architecture
        check_architecture(name, str(self.weights))
        arguments = {**(self.config.get("model_args") or {}), "num_classes": self.num_classes}
        cfg = {**cfg_of(name), **(self.config.get("pretrained_cfg") or {})}
        try:
            model = create_model(name, pretrained=False, pretrained_cfg=cfg or None, **arguments)
        except Exception as error:  # whatever a model's constructor makes of foreign arguments
            raise CheckpointError(
                f"{self.weights}: timm cannot build {name} from its config ({one_line(error)})"
            ) from None
        _check_shapes(model, self)
        load_checkpoint(model, self.weights)
        return model if self.adapter is None else with_adapter(model, self.adapter)

    def write(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        """New weights in the given types and with the given metadata, and ``config.json``.

        Returns:
            The digest of the weights.
        """
        save_weights(in_types(model, self.dtypes), folder)
        keep_metadata(folder / WEIGHTS, self.weights)
        if self.folder is not None:
            shutil.copyfile(self.folder / CONFIG, folder / CONFIG)
        else:
            (folder / CONFIG).write_text(json.dumps(dict(self.config), indent=1) + "\n")
        return {"weights_sha256": file_digest(folder / WEIGHTS)}


def read_checkpoint(
    path: Path, arch: str | None = None, image_size: int | None = None
) -> Checkpoint:
    """Finds the weights and what they belong to.

    Args:
        path: A folder with ``model.safetensors`` and ``config.json`` as timm writes them for the
            hub, a ``.safetensors`` file, or the name of such a model on the hub, which is fetched.
        arch: timm's name, for a bare file.
        image_size: Side in px of the images that a bare file was trained on, where its weights do
            not tell it.

    Raises:
        CheckpointError: Something is missing, pickled or malformed.
        ConfigError: ``arch`` is given for a folder, or missing for a file.
    """
    if path.is_dir() or is_repository(path):
        if arch is not None or image_size is not None:
            raise ConfigError(
                f"{path}: its {CONFIG} names the architecture and model_args.img_size; leave out "
                "arch and image_size, or give the .safetensors file itself"
            )
        if path.is_dir():
            return _read_folder(path)
        return replace(_read_folder(fetch(path, _FETCHED)), repository=parsed(path)[0])
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such folder or .safetensors file; give one, or OWNER/NAME of the hub"
        )
    refuse_pickles(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: not a .safetensors file, nor a folder with {WEIGHTS}")
    if arch is None:
        raise ConfigError(
            f"{path}: a bare file needs arch, its timm name; or give a folder with "
            f"{WEIGHTS} and {CONFIG}"
        )
    bare = Checkpoint(path, {"architecture": arch}, None)
    if not bare.shapes:
        raise CheckpointError(f"{path}: not a readable safetensors file, or an empty one")
    refuse_wrapped(path, bare.shapes)
    config = inferred_config(bare.shapes, arch, str(path))
    if image_size is not None:
        config = with_image_size(config, image_size)
    return replace(bare, config=config)


def is_timm(path: Path) -> bool:
    """Whether a folder or a name of the hub is a model of timm: its config has an architecture."""
    if is_adapter(path):
        path = Path(base_of(path))
    if is_repository(path):
        path = fetch(path, [CONFIG])
    try:
        return "architecture" in json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _read_folder(folder: Path) -> Checkpoint:
    if is_adapter(folder):
        return replace(read_base(folder, read_checkpoint), repository=None, adapter=folder)
    weights, config = folder / WEIGHTS, folder / CONFIG
    if not weights.is_file():
        for other in sorted(folder.iterdir()):
            refuse_pickles(other)
        raise CheckpointError(f"{folder}: holds no {WEIGHTS}")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: holds no {CONFIG}; add it, or give the file with arch"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{config}: must be a mapping")
    if "architecture" not in content and content.get("architectures"):
        raise CheckpointError(
            f"{config}: a model of transformers, and a folder of images needs one of timm's; give "
            "texts as .jsonl files; in Python, forget() takes any module that returns logits"
        )
    return replace(_checked(weights, _in_parts(content), str(config)), folder=folder)


def _in_parts(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config as timm reads it: an old one has no parts, and ``labels`` for ``label_names``."""
    nested = content.get("pretrained_cfg")
    if not nested:
        nested = {key: content[key] for key in PREPARATION if key in content}
        names = {"label_names": content["labels"]} if "labels" in content else {}
        return {**names, **content, **({"pretrained_cfg": nested} if nested else {})}
    shared = ("num_classes", "label_names") if isinstance(nested, dict) else ()
    return {**{key: nested[key] for key in shared if key in nested}, **content}


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


def _check_shapes(model: nn.Module, checkpoint: Checkpoint) -> None:
    """A wrong number of classes and another image size deserve messages of their own."""
    shapes = checkpoint.shapes
    key = classifier_key(model)
    if key in shapes and shapes[key][0] != checkpoint.num_classes:
        raise CheckpointError(
            f"{checkpoint.weights}: its classifier has {shapes[key][0]} classes, not num_classes "
            f"{checkpoint.num_classes}"
        )
    size = stored_image_size(shapes.get(POSITIONS), model)
    if size is not None:
        raise CheckpointError(
            f"{checkpoint.weights}: its '{POSITIONS}' is that of images of {size} px; leave "
            f"out image_size, or correct model_args.img_size in {CONFIG}"
        )
