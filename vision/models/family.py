"""What methods must know of timm's vision transformers, whoever trained them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.protocol.benchmark import ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

    from common.data.batch import Batch


class VisionTransformers(ModelFamily):
    """timm's names of layers, and images as ``inputs["x"]``, (N, C, H, W)."""

    @property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """Linear layers of a timm vision transformer."""
        return TARGETS

    @property
    def head(self) -> Sequence[str]:
        """timm's usual names of the classifier."""
        return ("head.*", "fc.*", "classifier.*")

    def component_of(self, name: str) -> str:
        """mlp, attention, head or other."""
        return component_of(name)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N, C) logits."""
        return model(batch.inputs["x"])


MLP = ("blocks.*.mlp.fc1", "blocks.*.mlp.fc2")
ATTENTION = ("blocks.*.attn.qkv", "blocks.*.attn.proj")
TARGETS: dict[str, tuple[str, ...]] = {"mlp": MLP, "attention": ATTENTION, "all": MLP + ATTENTION}
"""Placement of adapters -> patterns of module names in timm's vision transformers."""
_HEADS = frozenset({"head", "head_dist", "heads", "fc", "classifier"})


# -- parameters -----------------------------------------------------------------------------------


def component_of(parameter_name: str) -> str:
    """``mlp``, ``attention``, ``head`` or ``other``, from a parameter's dotted name."""
    parts = parameter_name.split(".")
    if parts[0] in _HEADS:
        return "head"
    if "mlp" in parts:
        return "mlp"
    return "attention" if "attn" in parts else "other"
