"""Families of image classifiers: what methods must know of their layers, one row each."""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.protocol.family import ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.data.batch import Batch
    from stable_forgetting.common.measure.ceiling import LastLayers

_PARTS = {"mlp": "mlp", "conv_pw": "mlp", "conv_pwl": "mlp", "attn": "attention"}
BETWEEN = ("attn_pool", "head_dist", "aux_head")
"""What some transformers of timm have between norm and head, or add to its logits."""


@dataclass(frozen=True)
class Family:
    """What timm's models of one family have in common.

    Attributes:
        architectures: Patterns of timm's names.
        mlp: Patterns of the names of the MLPs' linear layers; empty where there are none.  Of
            inverted bottlenecks: the 1x1 convolutions that expand and project.
        attention: Patterns of the names of the attention's linear layers; likewise.
        classifiers: Names of the layers that make the logits; empty where timm says it for each
            architecture.
        takes_size: Whether timm builds it for a given image size; else it takes any.
        shrunk: Arguments of timm that make a small one.
        channels_last: Whether tensors keep the channels of a position together: on a CPU,
            depthwise and 1x1 convolutions are then about twice as fast.
    """

    architectures: tuple[str, ...]
    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    classifiers: tuple[str, ...] = ()
    takes_size: bool = True
    shrunk: Mapping[str, int] = field(default_factory=dict)
    channels_last: bool = False

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Placement of adapters -> patterns of module names, for placements that there are."""
        placements = {
            "mlp": self.mlp,
            "attention": self.attention,
            "all": self.mlp + self.attention,
        }
        return {name: patterns for name, patterns in placements.items() if patterns}

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the layers that make the logits, without a norm or a layer before them."""
        return self.classifiers or _named_by_timm(self.architectures[0])

    @property
    def head(self) -> tuple[str, ...]:
        """Patterns of the classifier's parameter names."""
        return tuple(f"{name}.*" for name in self.heads)

    def component_of(self, name: str) -> str:
        """``mlp``, ``attention``, ``head`` or ``other``, from a parameter's dotted name."""
        if name.startswith(tuple(f"{head}." for head in self.heads)):
            return "head"
        return next((_PARTS[part] for part in name.split(".") if part in _PARTS), "other")


@cache
def _named_by_timm(architecture: str) -> tuple[str, ...]:
    """What timm calls the classifier; the usual names of a model that it does not know."""
    from timm.models import get_pretrained_cfg, is_model

    name = architecture.partition(".")[0]
    known = get_pretrained_cfg(name) if is_model(name) else None
    named = getattr(known, "classifier", None) or ("head", "head_dist", "fc", "classifier")
    return (named,) if isinstance(named, str) else tuple(named)


def _blocks(prefix: str, *layers: str) -> tuple[str, ...]:
    return tuple(f"{prefix}blocks.*.{layer}" for layer in layers)


_MLP, _ATTENTION = ("mlp.fc1", "mlp.fc2"), ("attn.qkv", "attn.proj")

VIT = Family(
    ("scratch", "vit_*", "deit*"),
    _blocks("", *_MLP),
    _blocks("", *_ATTENTION),
    classifiers=("head", "head_dist"),
    shrunk={"embed_dim": 48, "depth": 2, "num_heads": 3},
)
FAMILIES = (
    VIT,
    Family(
        ("swin_*",),
        _blocks("layers.*.", *_MLP),
        _blocks("layers.*.", *_ATTENTION),
        classifiers=("head",),
    ),
    Family(("resnet*", "wide_resnet*", "resnext*"), (), (), takes_size=False),
    Family(
        ("*efficientnet*", "mobilenetv2*"),
        _blocks("", "conv_pw", "conv_pwl"),
        (),
        classifiers=("classifier",),
        takes_size=False,
        channels_last=True,
    ),
)
OTHER = Family(("*",), VIT.mlp, VIT.attention)
"""Any other model of timm: many are built like a ViT."""


def family_of(architecture: str) -> Family:
    """The family of ``scratch`` or of one of timm's names, with or without a tag."""
    for family in FAMILIES:
        if any(fnmatch.fnmatchcase(architecture, pattern) for pattern in family.architectures):
            break
    else:
        family = OTHER
    return family if family.classifiers else replace(family, architectures=(architecture,))


class ImageClassifiers(ModelFamily):
    """timm's names of layers, and images as ``inputs["x"]``, (N, C, H, W)."""

    @property
    @abstractmethod
    def architecture(self) -> str:
        """``scratch`` or timm's name."""

    @property
    def family(self) -> Family:
        """What the layers of this architecture are called."""
        return family_of(self.architecture)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N, C) logits.

        Raises:
            CheckpointError: The model gives something else, as one with auxiliary heads does in
                training.
            ConfigError: It cannot normalise a batch of one image.
        """
        import torch

        try:
            logits = model(batch.inputs["x"])
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ConfigError(
                "the model's batch normalisation cannot train on a batch of one image; choose a "
                "batch_size that leaves no image over"
            ) from None
        if not isinstance(logits, torch.Tensor):
            mode = "training" if model.training else "evaluation"
            raise CheckpointError(
                f"in {mode} the model gives a {type(logits).__name__} and no logits (N, classes); "
                "turn its auxiliary heads off, or wrap it in a module that gives logits alone"
            )
        return logits

    def last_layers(self, model: nn.Module) -> LastLayers | None:
        """The LayerNorm and the head of a transformer."""
        return last_layers(model)


def last_layers(model: nn.Module) -> LastLayers | None:
    """The LayerNorm and the head of a timm transformer; None if it does not end in these.

    A mean over patches lies in the ball that their sphere bounds, so the pooling does not matter.
    """
    import torch
    from torch import nn

    from stable_forgetting.common.measure.ceiling import LastLayers

    network: Any = model
    if any(getattr(network, name, None) is not None for name in BETWEEN):
        return None
    head = getattr(network, "head", None)
    head = getattr(head, "fc", head)  # timm's heads with a pooling of their own
    own = getattr(network, "fc_norm", None)
    norm = own if isinstance(own, nn.LayerNorm) else getattr(network, "norm", None)
    if not (isinstance(norm, nn.LayerNorm) and isinstance(head, nn.Linear)):
        return None
    gain, shift = norm.weight, norm.bias
    if gain is None or head.in_features != norm.normalized_shape[-1]:
        return None
    bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
    return LastLayers(gain, torch.zeros_like(gain) if shift is None else shift, head.weight, bias)
