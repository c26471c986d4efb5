"""What all causal language models share as a family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_forgetting.common.protocol.family import ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.data.batch import Batch
    from stable_forgetting.common.measure.ceiling import LastLayers


class CausalModels(ModelFamily):
    """Token ids as ``inputs["input_ids"]``, (N, L), and logits at the labels' positions."""

    modality = "language"
    longest = 1024
    """Tokens of a sample, at most, unless more are asked for."""

    @property
    def evaluation_batch(self) -> int:
        """Samples per forward without gradients: at most 32, and of 32,768 tokens."""
        return max(1, min(32, 32_768 // self.longest))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N, A, V) logits at the answers' positions."""
        from stable_forgetting.language.models.backbone import causal_forward

        return causal_forward(model, batch)

    def last_layers(self, model: nn.Module) -> LastLayers | None:
        """The last normalisation and the head, tied or not."""
        from stable_forgetting.language.models.backbone import last_layers

        return last_layers(model)
