"""``unlearn apply --convert``: pickled weights become a folder that ``unlearn apply`` takes."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.apply.place import check_out, workplace
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.store.pickled import read_weights, write_weights
from stable_forgetting.common.store.weights import CONFIG, WEIGHTS
from stable_forgetting.vision.apply.sizes import (
    inferred_config,
    with_image_size,
    with_preparation,
)

BESIDE = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer*.*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.*",
    "LICENSE*",
)
"""Files beside the given one that are copied: config, tokenizer and licence, and nothing else."""


def convert(
    file: Path,
    out: Path,
    *,
    arch: str | None = None,
    image_size: int | None = None,
    label_names: Sequence[str] = (),
) -> list[str]:
    """Writes a folder of weights, or nothing.

    Args:
        file: Pickled weights, or a .safetensors file with the names of a wrapper.
        out: Folder to make.
        arch: timm's name, for image models without a config.
        image_size: Side in px, where the weights do not say it.
        label_names: Names of the classes, in the order of their ids.

    Returns:
        What was done, one line each.

    Raises:
        UserError: The file holds more than weights, or is not of the architecture.
    """
    check_out(out)
    if arch is None and (image_size is not None or label_names):
        raise ConfigError("image_size and label_names need arch, the timm name of the model")
    weights = read_weights(file)
    config = None
    if arch is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        config = inferred_config(shapes, arch, str(file))
        config = config if image_size is None else with_image_size(config, image_size)
        config = with_preparation(config) | _named(label_names, config["num_classes"])
    with workplace(out, {}) as place, place.writing() as folder:
        write_weights(weights, folder / WEIGHTS)
        copied = _copy_beside(file, folder)
        if config is not None:
            write_json(folder / CONFIG, config)
    types = sorted({str(t.dtype).removeprefix("torch.") for t in weights.tensors.values()})
    lines = [f"wrote {out}: {len(weights.tensors)} tensors ({', '.join(types)})"]
    if weights.entry:
        lines.append(f"the weights lay under '{weights.entry}'; what else the file held was left")
    if weights.prefix:
        lines.append(f"the prefix '{weights.prefix}' of a wrapper was taken off every name")
    if config is not None:
        lines.append(f"{CONFIG}: {json.dumps(config)}")
        lines.append(
            f"images are prepared as timm has it for {arch}: correct mean, std, crop_pct and "
            f"interpolation in pretrained_cfg of {CONFIG} if the model was trained on others"
        )
    elif CONFIG not in copied:
        lines.append(f"no {CONFIG} lies beside {file.name}: give --arch, or add one")
    return lines + ([f"copied {', '.join(copied)}"] if copied else [])


def _named(names: Sequence[str], classes: int) -> dict[str, Any]:
    if names and len(names) != classes:
        raise ConfigError(f"label_names: {len(names)} names for {classes} classes; give one each")
    return {"label_names": list(names)} if names else {}


def _copy_beside(file: Path, folder: Path) -> list[str]:
    """Copies config and tokenizer; returns their names."""
    chosen = [
        path
        for path in sorted(file.parent.iterdir())
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in BESIDE)
    ]
    for path in chosen:
        shutil.copyfile(path, folder / path.name)
    return [path.name for path in chosen]
