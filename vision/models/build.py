"""Image classifiers: from scratch, from timm, or from a local checkpoint.

Weights are drawn from a seed without touching the global random state, and read from
safetensors only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_model_data_config
from timm.models import create_model, get_pretrained_cfg, is_model, list_models
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError, DataError, one_line
from stable_forgetting.common.base.hub import fetch, is_repository, prepare_client
from stable_forgetting.common.methods.tools.layers import as_in_evaluation
from stable_forgetting.common.store.adapters import base_of, is_adapter, with_adapter
from stable_forgetting.common.store.packages import PACKAGE
from stable_forgetting.common.store.weights import WEIGHTS
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.data.source import InputSpec
from stable_forgetting.vision.models.checkpoint import (
    load_checkpoint,
    load_tensors,
    preparation_of,
)
from stable_forgetting.vision.models.family import family_of
from stable_forgetting.vision.models.packages import package_state

# digits as sparse strokes on black; CIFAR-10's channel statistics for every colour image
_GREY = ((0.3,), (0.35,))
_COLOUR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class ConvStem(nn.Module):
    """Patch embedding behind two 3x3 convolutions of stride 2 (32 and 64 channels).

    GroupNorm, not BatchNorm: running statistics would drift while a model unlearns.
    Takes the arguments that timm gives to an ``embed_layer``.
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **_: Any,
    ):
        super().__init__()
        like = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = []
        for inputs, outputs in ((in_chans, 32), (32, 64)):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, **like))
            layers += [nn.GroupNorm(8, outputs, **like), nn.GELU()]
        self.convolutions = nn.Sequential(*layers)
        side = patch_size // 4
        self.proj = nn.Conv2d(64, embed_dim, side, stride=side, bias=bias, **like)
        self.num_patches = (img_size // patch_size) ** 2

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, S, S) -> (N, patches, dim)."""
        return self.proj(self.convolutions(x)).flatten(2).transpose(1, 2)


def build_model(
    config: ModelConfig,
    *,
    num_classes: int,
    in_chans: int,
    generator_seed: int,
    image_size: int | None = None,
) -> nn.Module:
    """A classifier on the CPU; the same seed gives the same bits.

    Args:
        num_classes: Width of the logits.
        in_chans: Channels of the images.
        generator_seed: Seed of the weights that are not loaded.
        image_size: Input side in px that replaces the model's own.

    Returns:
        (N, in_chans, S, S) -> logits (N, num_classes).

    Raises:
        ConfigError: timm does not know the name or cannot build it at this size.
        DataError: Pretrained weights cannot be fetched, or their package is not installed.
        CheckpointError: The checkpoint is missing, damaged or of another model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator_seed)
        model = construct(config, num_classes, in_chans, image_size or config.image_size)
        if config.checkpoint is not None:
            _load(model, config, config.checkpoint)
    if config.frozen_statistics:
        freeze_statistics(model)
    if family_of(config.name).channels_last:
        model.to(memory_format=torch.channels_last)
    size = input_spec(config, in_chans=in_chans, image_size=image_size).size
    width = _logits_width(model, (2, in_chans, size, size))  # one would not do for a batch norm
    assert width == num_classes, f"{config.name}: {width} logits for {num_classes} classes"
    return model


def _load(model: nn.Module, config: ModelConfig, checkpoint: str) -> None:
    head = () if config.name == "scratch" else family_of(config.name).head
    if not checkpoint.startswith(PACKAGE):
        _load_file(model, checkpoint, head)
        return
    fresh: Any = model
    fresh.reset_classifier(fresh.num_classes)  # timm's first draw gives logits of some tens
    state = package_state(checkpoint, config.name, model)
    load_tensors(model, state, checkpoint, new_head=head, keep_head=False)


def _load_file(model: nn.Module, checkpoint: str, head: Sequence[str]) -> None:
    """From a file, a folder, the hub, or an adapter and the model that it is for."""
    path = Path(checkpoint)
    if is_adapter(path):
        _load_file(model, base_of(path), head)
        with_adapter(model, path)  # in place
        return
    if is_repository(checkpoint):
        path = fetch(checkpoint, [WEIGHTS])
    load_checkpoint(model, path / WEIGHTS if path.is_dir() else path, new_head=head)


def construct(
    config: ModelConfig, num_classes: int, in_chans: int, image_size: int | None
) -> nn.Module:
    """The architecture on torch's current device, with weights drawn from torch's own stream."""
    if config.name == "scratch":
        return _scratch(config, num_classes, in_chans, image_size)
    _check_name(config.name)
    family = family_of(config.name)
    sized = image_size is not None and family.takes_size
    sizes: dict[str, Any] = {"img_size": image_size} if sized else {}
    sizes |= family.shrunk if config.shrunk else {}
    build: Callable[[], nn.Module] = partial(
        create_model,
        config.name,
        pretrained=config.pretrained,
        num_classes=num_classes,
        in_chans=in_chans,
        **sizes,
    )
    if config.pretrained:
        return _fetch_pretrained(config.name, build)
    try:
        return build()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"model {config.name}: timm cannot build it ({one_line(error)})"
        ) from None


def _scratch(
    config: ModelConfig, num_classes: int, in_chans: int, image_size: int | None
) -> nn.Module:
    assert config.patch_size and image_size and config.dim and config.depth and config.heads
    if image_size % config.patch_size:
        raise ConfigError(
            f"image_size {image_size} is not a multiple of patch_size {config.patch_size}"
        )
    stem: dict[str, Any] = {"embed_layer": ConvStem} if config.stem == "conv" else {}
    return VisionTransformer(
        img_size=image_size,
        patch_size=config.patch_size,
        in_chans=in_chans,
        num_classes=num_classes,
        embed_dim=config.dim,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio or 4.0,
        global_pool=config.pool or "token",
        class_token=config.pool != "avg",
        **stem,
    )


def _check_name(name: str) -> None:
    if not is_model(name):
        close = difflib.get_close_matches(name, list_models(), n=1, cutoff=0.6)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"model {name}: neither 'scratch' nor known to timm{hint}")
    try:
        get_pretrained_cfg(name)
    except RuntimeError:
        arch, _, tag = name.partition(".")
        tags = [full.partition(".")[2] for full in list_models(f"{arch}.*", pretrained=True)]
        raise ConfigError(f"model {name}: {arch} has no weights '{tag}'; it has {tags}") from None


def _fetch_pretrained(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    prepare_client()
    try:
        return build()
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise DataError(
            f"model {name}: pretrained weights cannot be fetched ({one_line(error)}); give"
            " checkpoint: FILE.safetensors, or run once on a machine with a network"
        ) from None


def _logits_width(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Width of the output, by a forward pass on the meta device (shapes only)."""
    state = [*model.named_parameters(), *model.named_buffers()]
    meta = {name: tensor.detach().to("meta") for name, tensor in state}
    with torch.no_grad():
        logits = torch.func.functional_call(model, meta, (torch.empty(shape, device="meta"),))
    return logits.shape[1]


def input_spec(
    config: ModelConfig, *, in_chans: int = 3, image_size: int | None = None
) -> InputSpec:
    """Input side, mean and std of a model, without building it.

    timm models bring their own, which the ``config.json`` in a checkpoint's folder may replace;
    grey images get the mean over the channels.  Scratch models take (0.3, 0.35) for grey and
    CIFAR-10's statistics for colour images.
    """
    size = image_size or config.image_size
    if config.name == "scratch":
        assert size is not None
        return InputSpec(size, *(_GREY if in_chans == 1 else _COLOUR))
    _check_name(config.name)
    registered = get_pretrained_cfg(config.name)
    assert registered is not None
    prepared = {**registered.to_dict(), **preparation_of(config.checkpoint)}
    resolved = resolve_model_data_config(None, pretrained_cfg=prepared)
    mean, std = (tuple(map(float, resolved[key])) for key in ("mean", "std"))
    if in_chans != len(mean):
        mean, std = ((sum(values) / len(values),) * in_chans for values in (mean, std))
    return InputSpec(size or resolved["input_size"][-1], mean, std)


def freeze_statistics(model: nn.Module) -> None:
    """From now on batch normalisation takes its running statistics in training too.

    What a training lowers is then the loss of the model that is measured, and no batch of forget
    samples alone decides how retain samples are normalised.  Gains and shifts stay trainable.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_pre_hook(as_in_evaluation)
