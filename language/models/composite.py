"""Two causal models that answer as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.language.models.backbone import cache_input, cache_output


@dataclass
class Caches:
    """What both models remember of a text while they continue it."""

    baseline: Any
    reinforced: Any

    def batch_select_indices(self, places: Tensor) -> None:
        """Drops all rows but those at (N,) places."""
        self.baseline.batch_select_indices(places)
        self.reinforced.batch_select_indices(places)


@dataclass
class CompositeOutput:
    """What a causal model returns, as far as this project reads it."""

    logits: Tensor
    past_key_values: Caches | None


class LogitDifference(nn.Module):
    """v_b - a ReLU(v_r - v_b), v the logits of a baseline and of a reinforced model.

    Takes what either model takes.  It has no single head behind one decoder, and says so: its
    output embeddings are None, so that whoever asks runs it whole.

    Args:
        baseline: The model before reinforcement.
        reinforced: The same architecture, fine-tuned on what is to be forgotten.
        a: How much of what reinforcement raised is taken off.
    """

    def __init__(self, baseline: nn.Module, reinforced: nn.Module, a: float):
        super().__init__()
        self.baseline, self.reinforced, self.a = baseline, reinforced, a

    @property
    def config(self) -> Any:
        """Of the baseline."""
        return self.baseline.config

    @property
    def generation_config(self) -> Any:
        """Of the baseline."""
        return getattr(self.baseline, "generation_config", None)

    def get_output_embeddings(self) -> None:
        """No linear map makes these logits."""

    def forward(self, *args: Any, past_key_values: Caches | None = None, **inputs: Any) -> Any:
        """Logits of both, combined; where the models return plain logits, so does this."""
        caches: list[dict[str, Any]] = [{}, {}]
        if past_key_values is not None:
            both = past_key_values.baseline, past_key_values.reinforced
            models = self.baseline, self.reinforced
            caches = [cache_input(*pair) for pair in zip(models, both, strict=True)]
        one = self.baseline(*args, **inputs, **caches[0])
        two = self.reinforced(*args, **inputs, **caches[1])
        if isinstance(one, Tensor):
            return self._combined(one, two)
        first = cache_output(one)
        remembered = None if first is None else Caches(first, cache_output(two))
        return CompositeOutput(self._combined(one.logits, two.logits), remembered)

    def _combined(self, baseline: Tensor, reinforced: Tensor) -> Tensor:
        return baseline - self.a * F.relu(reinforced - baseline)
