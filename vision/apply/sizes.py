"""What weights alone say of a timm model: its number of classes and its image size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, one_line

if TYPE_CHECKING:
    from torch import nn

Shapes = Mapping[str, Sequence[int]]
"""Name of a tensor -> its shape."""
POSITIONS = "pos_embed"


def check_architecture(name: str, origin: str) -> None:
    """Raises if timm does not know an architecture.

    Raises:
        CheckpointError: Naming a similar one.
    """
    from timm.models import is_model, list_models

    if not is_model(name):
        hint = did_you_mean(name, list_models()) if name else ""
        hint = hint if "did you mean" in hint else ""
        raise CheckpointError(f"{origin}: timm knows no architecture '{name}'{hint}")


def with_image_size(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A config of timm's for images of another size.

    A model with a grid of patches takes ``img_size``; any other is only told its input.

    Raises:
        ConfigError: The architecture takes no images of this size.
    """
    name = config["architecture"]
    arguments = {**(config.get("model_args") or {}), "img_size": size}
    try:
        _try_size(_blank(name, arguments), size)
        return {**config, "model_args": arguments}
    except TypeError:
        from timm.models import get_pretrained_cfg

        given = get_pretrained_cfg(name)
        cfg = {**(given.to_dict() if given else {}), **(config.get("pretrained_cfg") or {})}
        channels = (cfg.get("input_size") or (3,))[0]
        return {**config, "pretrained_cfg": {**cfg, "input_size": [channels, size, size]}}
    except Exception as error:  # whatever a model's constructor makes of a size
        raise ConfigError(f"image_size: {name} takes no {size} px ({one_line(error)})") from None


def _try_size(model: nn.Module, size: int) -> None:
    """A forward without memory, which raises what a real one would."""
    import torch

    channels = getattr(model, "pretrained_cfg", {}).get("input_size", (3,))[0]
    model.eval()(torch.zeros(1, channels, size, size, device="meta"))


def _blank(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The architecture without memory."""
    import torch
    from timm.models import create_model

    with torch.device("meta"):
        return create_model(name, pretrained=False, **arguments)


def inferred_config(shapes: Shapes, architecture: str, origin: str) -> dict[str, Any]:
    """What ``config.json`` says of weights whose architecture is known.

    Raises:
        CheckpointError: They are of another architecture.
    """
    check_architecture(architecture, origin)
    model = _blank(architecture, {})
    key = classifier_key(model)
    if key is None or key not in shapes:
        raise CheckpointError(
            f"{origin}: holds no '{key}'; it belongs to another model than {architecture}"
        )
    config: dict[str, Any] = {"architecture": architecture, "num_classes": int(shapes[key][0])}
    size = stored_image_size(shapes.get(POSITIONS), model)
    return config if size is None else with_image_size(config, size)


def fitting_config(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any] | None:
    """The config of timm's that builds a model with the tensors of this one; None if none does.

    Args:
        config: Architecture and number of classes.
        model: Built by timm, with whatever arguments.
    """
    side = getattr(getattr(model, "patch_embed", None), "img_size", None)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for more in ({}, {"model_args": {"img_size": side and side[0]}}):
        arguments = {"num_classes": config["num_classes"], **more.get("model_args", {})}
        try:
            blank = _blank(config["architecture"], arguments).state_dict()
        except Exception:
            continue
        if {name: tensor.shape for name, tensor in blank.items()} == shapes:
            return {**config, **more}
    return None


def classifier_key(model: nn.Module) -> str | None:
    """Name of the classifier's bias."""
    classifier: Any = getattr(model, "get_classifier", lambda: None)()
    named = (name for name, module in model.named_modules() if module is classifier)
    name = next(named, None)
    return None if name is None else f"{name}.bias"


def stored_image_size(shape: Sequence[int] | None, model: nn.Module) -> int | None:
    """Side in px of the images that a position embedding is for, where it is not the model's own.

    Args:
        shape: Of the stored embedding, (1, tokens, width).
        model: A vision transformer, or any other model.
    """
    own: Any = getattr(model, POSITIONS, None)
    patches: Any = getattr(model, "patch_embed", None)
    if shape is None or own is None or patches is None or list(shape) == list(own.shape):
        return None
    if len(shape) != 3 or shape[2] != own.shape[2]:
        return None
    side = getattr(patches, "patch_size", None)
    prefix = own.shape[1] - patches.num_patches
    grid = math.isqrt(max(shape[1] - prefix, 0))
    square = grid > 0 and grid * grid == shape[1] - prefix
    return grid * side[0] if square and side is not None else None
