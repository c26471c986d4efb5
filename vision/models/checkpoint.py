"""Local checkpoints of vision models."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from common.base.errors import CheckpointError
from vision.models.family import component_of

logger = logging.getLogger(__name__)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


# -- checkpoints ----------------------------------------------------------------------------------


def load_checkpoint(model: nn.Module, path: Path, *, new_head: bool = False) -> None:
    """Loads a safetensors file in place.

    Args:
        model: Its names and shapes decide what the file must hold.
        path: ``*.safetensors``; pickled formats are refused, since loading them can run code.
        new_head: Keep the model's own classifier where the file's has another number of classes,
            and resample position embeddings of another image size.

    Raises:
        CheckpointError: With the first key that does not fit.
    """
    state = _read_safetensors(path)
    wanted = model.state_dict()
    if new_head:
        state = _adapted(state, wanted, model)
    for key in [*wanted, *state]:
        problem = _problem(key, state, wanted)
        if problem:
            raise CheckpointError(f"{path}: {problem}; it belongs to another model")
    model.load_state_dict(state)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: only .safetensors files are read, because loading a pickle can run code;"
            " convert it with safetensors.torch.save_file"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({_line(error)})") from None


def _problem(key: str, state: dict[str, Tensor], wanted: dict[str, Tensor]) -> str | None:
    if key not in state:
        return f"'{key}' is missing"
    if key not in wanted:
        return f"'{key}' is unknown"
    if state[key].shape != wanted[key].shape:
        return f"'{key}' has shape {tuple(state[key].shape)}, not {tuple(wanted[key].shape)}"
    if not torch.isfinite(state[key]).all():
        return f"'{key}' holds NaN or infinite numbers"
    return None


def _adapted(
    state: dict[str, Tensor], wanted: dict[str, Tensor], model: nn.Module
) -> dict[str, Tensor]:
    heads = [key for key in wanted if component_of(key) == "head"]
    fits = all(key in state and state[key].shape == wanted[key].shape for key in heads)
    adapted = dict(state)
    if not fits:
        logger.warning(
            "the checkpoint's classifier has another number of classes: a new one is used"
        )
        adapted = {key: value for key, value in state.items() if component_of(key) != "head"}
        adapted |= {key: wanted[key] for key in heads}
    old, new = adapted.get("pos_embed"), wanted.get("pos_embed")
    if not isinstance(model, VisionTransformer) or old is None or new is None:
        return adapted
    if old.shape != new.shape and old.ndim == 3 and old.shape[-1] == new.shape[-1]:
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        size = list(model.patch_embed.grid_size)
        adapted["pos_embed"] = resample_abs_pos_embed(old, size, num_prefix_tokens=prefix)
    return adapted
