"""Local checkpoints of vision models."""

from __future__ import annotations

import fnmatch
import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from stable_forgetting.common.base.errors import CheckpointError, one_line
from stable_forgetting.common.store.weights import CONFIG, refuse_wrapped

logger = logging.getLogger(__name__)


def load_checkpoint(
    model: nn.Module, path: Path, *, new_head: Sequence[str] = (), keep_head: bool = True
) -> None:
    """Loads a safetensors file in place.

    Args:
        model: Its names and shapes decide what the file must hold.
        path: ``*.safetensors``; pickled formats are refused, since loading them can run code.
        new_head: Patterns of a classifier's parameter names: the model's own is left where the
            file's has another number of classes, and position embeddings of another image size
            are resampled.  Without them everything must fit.
        keep_head: Take the file's classifier where it has as many classes; its own if not.

    Raises:
        CheckpointError: With the first key that does not fit.
    """
    state = _read_safetensors(path)
    refuse_wrapped(path, state)
    load_tensors(model, state, str(path), new_head=new_head, keep_head=keep_head)


def preparation_of(checkpoint: str | None) -> dict[str, Any]:
    """``mean`` and ``std`` of images, where a ``config.json`` in a checkpoint's folder has them.

    Raises:
        CheckpointError: They cannot be read.
    """
    file = Path(checkpoint or "", CONFIG)
    if not checkpoint or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        own = content.get("pretrained_cfg") or content
        return {key: [float(value) for value in own[key]] for key in ("mean", "std") if key in own}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: mean and std cannot be read ({one_line(error)})") from None


def load_tensors(
    model: nn.Module,
    state: dict[str, Tensor],
    source: str,
    *,
    new_head: Sequence[str] = (),
    keep_head: bool = True,
) -> None:
    """:func:`load_checkpoint` from tensors that are read; ``source`` is named in errors."""
    wanted = model.state_dict()
    if new_head:
        state = _adapted(state, wanted, model, new_head, keep_head)
    for key in [*wanted, *state]:
        problem = _problem(key, state, wanted)
        if problem:
            raise CheckpointError(f"{source}: {problem}; it belongs to another model")
    model.load_state_dict(state)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: only .safetensors files are read, because loading a pickle can run code;"
            f" run: unlearn apply --convert {shlex.quote(str(path))} --out FOLDER"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({one_line(error)})"
        ) from None


def _problem(key: str, state: dict[str, Tensor], wanted: dict[str, Tensor]) -> str | None:
    if key not in state:
        return f"'{key}' is missing"
    if key not in wanted:
        return f"'{key}' is unknown"
    if state[key].shape != wanted[key].shape:
        return f"'{key}' has shape {tuple(state[key].shape)}, not {tuple(wanted[key].shape)}"
    if wanted[key].is_floating_point() and not state[key].is_floating_point():
        return f"'{key}' holds {state[key].dtype} (quantised?), not floating-point numbers"
    if not torch.isfinite(state[key]).all():
        return f"'{key}' holds NaN or infinite numbers"
    return None


def _adapted(
    state: dict[str, Tensor],
    wanted: dict[str, Tensor],
    model: nn.Module,
    head: Sequence[str],
    keep_head: bool,
) -> dict[str, Tensor]:
    def of_head(key: str) -> bool:
        return any(fnmatch.fnmatch(key, pattern) for pattern in head)

    heads = [key for key in wanted if of_head(key)]
    fits = all(key in state and state[key].shape == wanted[key].shape for key in heads)
    adapted = dict(state)
    if keep_head and not fits:
        logger.warning(
            "the checkpoint's classifier has another number of classes: a new one is used"
        )
    if not (keep_head and fits):
        adapted = {key: value for key, value in state.items() if not of_head(key)}
        adapted |= {key: wanted[key] for key in heads}
    old, new = adapted.get("pos_embed"), wanted.get("pos_embed")
    if not isinstance(model, VisionTransformer) or old is None or new is None:
        return adapted
    if old.shape != new.shape and old.ndim == 3 and old.shape[-1] == new.shape[-1]:
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        size = list(model.patch_embed.grid_size)
        adapted["pos_embed"] = resample_abs_pos_embed(old, size, num_prefix_tokens=prefix)
    return adapted
