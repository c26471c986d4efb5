"""What methods must know of timm's vision transformers, whoever trained them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from common.benchmark import ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

    from common.loading import Batch


class VisionTransformers(ModelFamily):
    """timm's names of layers, and images as ``inputs["x"]``, (N, C, H, W)."""

    @property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """Linear layers of a timm vision transformer."""
        from vision.models import TARGETS

        return TARGETS

    @property
    def head(self) -> Sequence[str]:
        """timm's usual names of the classifier."""
        return ("head.*", "fc.*", "classifier.*")

    def component_of(self, name: str) -> str:
        """mlp, attention, head or other."""
        from vision.models import component_of

        return component_of(name)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N, C) logits."""
        return model(batch.inputs["x"])
