"""What weights alone say of a timm model: its number of classes and its image size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, one_line
from stable_forgetting.common.store.weights import CONFIG

if TYPE_CHECKING:
    from torch import nn

Shapes = Mapping[str, Sequence[int]]
"""Name of a tensor -> its shape."""
POSITIONS, PATCHES = "pos_embed", "patch_embed.proj.weight"
PREPARATION = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


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
    import torch

    name = config["architecture"]
    if size < 1:
        raise ConfigError(f"image_size: {size} is no side of an image; give 1 px or more")
    arguments = {**(config.get("model_args") or {}), "img_size": size}
    try:
        model = _blank(name, arguments).eval()
        own: Any = getattr(model, "pretrained_cfg", {})
        channels = arguments.get("in_chans") or own.get("input_size", (3,))[0]
        model(torch.zeros(1, channels, size, size, device="meta"))  # raises what a real one would
        return {**config, "model_args": arguments}
    except TypeError:
        cfg = {**cfg_of(name), **(config.get("pretrained_cfg") or {})}
        channels = (cfg.get("input_size") or (3,))[0]
        return {**config, "pretrained_cfg": {**cfg, "input_size": [channels, size, size]}}
    except Exception as error:  # whatever a model's constructor makes of a size
        raise ConfigError(f"image_size: {name} takes no {size} px ({one_line(error)})") from None


def cfg_of(name: str) -> dict[str, Any]:
    """What timm says of an architecture: input, mean, std, crop.  Nothing of where weights lie."""
    from timm.models import get_pretrained_cfg

    given = get_pretrained_cfg(name)
    return given.to_dict(remove_source=True, remove_null=True) if given else {}


def with_preparation(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of timm's that says how images are prepared, so that a user can correct it."""
    own, given = cfg_of(config["architecture"]), config.get("pretrained_cfg") or {}
    said = {**{key: own[key] for key in PREPARATION if key in own}, **given}
    arguments = config.get("model_args") or {}
    channels, height, width = said.get("input_size", (3, 224, 224))
    height = width = arguments.get("img_size", height)
    said["input_size"] = [arguments.get("in_chans", channels), height, width]
    return {**config, "pretrained_cfg": {**said, "num_classes": config["num_classes"]}}


def _blank(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The architecture without memory."""
    import torch
    from timm.models import create_model

    with torch.device("meta"):
        return create_model(name, pretrained=False, **arguments)


def inferred_config(shapes: Shapes, architecture: str, origin: str) -> dict[str, Any]:
    """What ``config.json`` says of weights whose architecture is known.

    A vision transformer may differ from its name in patch size, depth, channels and image size.

    Raises:
        CheckpointError: They are of another architecture.
    """
    check_architecture(architecture, origin)
    model = _blank(architecture, {})
    key = classifier_key(model)
    if key is None:
        raise CheckpointError(
            f"{origin}: the weights of {architecture} do not tell the number of classes; write a "
            f"{CONFIG} with architecture and num_classes beside them"
        )
    if key not in shapes:
        raise CheckpointError(
            f"{origin}: holds no '{key}'; it belongs to another model than {architecture}"
        )
    config: dict[str, Any] = {"architecture": architecture, "num_classes": int(shapes[key][0])}
    arguments = _stored_arguments(shapes, model)
    if arguments:
        config["model_args"] = arguments
        model = _blank(architecture, arguments)
    size = stored_image_size(shapes.get(POSITIONS), model)
    config = config if size is None else with_image_size(config, size)
    built = _blank(architecture, {**config.get("model_args", {}), "num_classes": shapes[key][0]})
    wanted = {name: tensor.shape for name, tensor in built.state_dict().items()}
    for name in [*wanted, *shapes]:
        problem = _misfit(name, shapes, wanted)
        if problem is not None:
            raise CheckpointError(
                f"{origin}: {problem}; it belongs to another model than {architecture}: name that "
                f"one, or leave arch out and write a {CONFIG} with its model_args"
            )
    return config


def _stored_arguments(shapes: Shapes, model: nn.Module) -> dict[str, Any]:
    """What weights say of a vision transformer, where it is not the architecture's own."""
    blocks: Any = getattr(model, "blocks", None)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    patches = tuple(shapes.get(PATCHES, ()))
    if blocks is None or len(patches) != 4 or len(own.get(PATCHES, ())) != 4:
        return {}
    numbers = {int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")}
    said = {"patch_size": patches[3], "in_chans": patches[1], "depth": len(numbers)}
    usual = {"patch_size": own[PATCHES][3], "in_chans": own[PATCHES][1], "depth": len(blocks)}
    return {name: value for name, value in said.items() if value != usual[name]}


def _misfit(name: str, shapes: Shapes, wanted: Shapes) -> str | None:
    if name not in shapes:
        return f"'{name}' is missing"
    if name not in wanted:
        return f"'{name}' is unknown"
    given, right = tuple(shapes[name]), tuple(wanted[name])
    return None if given == right else f"'{name}' has shape {given}, not {right}"


def fitting_config(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any] | None:
    """The config of timm's that builds this model, tensors and all; None if none does.

    Args:
        config: Architecture and number of classes.
        model: Built by timm, with whatever arguments.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    try:
        fitting = {**config, **inferred_config(shapes, config["architecture"], "the model")}
    except (CheckpointError, ConfigError):
        return None
    return fitting if _answers_alike(model, fitting) else None


def _answers_alike(model: nn.Module, config: Mapping[str, Any]) -> bool:
    """Whether the config's model gives the logits of this one, whose tensors it takes.

    Shapes do not tell some arguments, such as the number of heads.
    """
    import torch
    from timm.models import create_model

    from stable_forgetting.common.train.telemetry import evaluating

    size = with_preparation(config)["pretrained_cfg"]["input_size"]
    arguments = {**config.get("model_args", {}), "num_classes": config["num_classes"]}
    with torch.random.fork_rng(devices=[]):
        built = create_model(config["architecture"], pretrained=False, **arguments).eval()
    built.load_state_dict(model.state_dict(), assign=True)  # the same tensors, of any precision
    home = next(model.parameters())
    noise = torch.randn(2, *size, generator=torch.Generator().manual_seed(0)).to(home)
    try:
        with torch.no_grad(), evaluating(model):
            logits, others = model(noise), built.to(home.device)(noise)
    except (RuntimeError, AssertionError, ValueError, TypeError):  # it takes other images
        return False
    return bool((others - logits).norm() <= 1e-2 * logits.norm())  # TF32 differs by less


def classifier_key(model: nn.Module) -> str | None:
    """Name of the weight that makes the logits: that of the last layer of the last classifier."""
    found: Any = getattr(model, "get_classifier", lambda: None)()
    last = found[-1] if isinstance(found, tuple | list) else found
    inside = {id(module) for module in last.modules()} if hasattr(last, "modules") else set()
    weights = {
        f"{name}.weight": getattr(module, "weight", None)
        for name, module in model.named_modules()
        if id(module) in inside
    }
    names = [name for name, weight in weights.items() if weight is not None and weight.ndim > 1]
    return names[-1] if names else None


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
