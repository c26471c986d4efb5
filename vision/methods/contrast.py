"""NT-Xent on the inputs of the classifier, beside any other objective."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.objectives.objectives import Objective, ObjectiveValue
from stable_forgetting.common.objectives.positions import wide

VIEWS = "views"


def nt_xent(features: Tensor, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross-entropy of 2N features: rows i and i + N are a pair.

    Formula: mean_i ``-s_{i,pos}/tau + logsumexp_{k != i} s_{ik}/tau``, s = cosine similarity.
    Source: SimCLR, arXiv 2002.05709, eq. 1.

    Args:
        features: (2N, d), N >= 2 for a loss that is not 0.
        temperature: tau.
    """
    unit = F.normalize(wide(features), dim=1)
    similarity = unit @ unit.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    partner = torch.arange(len(unit), device=unit.device).roll(len(unit) // 2)
    return F.cross_entropy(similarity, partner)


class HeadInputs:
    """Keeps the input of a model's classifier (N, d) from its latest forward."""

    def __init__(self) -> None:
        self.latest: Tensor | None = None

    @contextlib.contextmanager
    def watching(self, model: nn.Module, head: Sequence[str]) -> Iterator[None]:
        """Listens to the linear layer whose parameters match ``head``.

        Raises:
            ConfigError: There is no such layer, or several.
        """
        layers: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if (
                any(fnmatch.fnmatch(f"{name}.weight", pattern) for pattern in head)
                and getattr(module, "weight", None) is not None
                and not name.startswith(tuple(f"{outer}." for outer in layers))
            ):  # an adapter's own layers are inside the head's
                layers[name] = module
        if len(layers) != 1:
            raise ConfigError(f"{len(layers)} layers match the head {', '.join(head)}; need one")
        try:
            (layer,) = layers.values()
            with layer.register_forward_pre_hook(self._keep):
                yield
        finally:
            self.latest = None

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.latest = args[0].flatten(1)  # of a classifier that is a 1x1 convolution


class Contrasted:
    """``objective + weight * NT-Xent`` on two views of retain images.

    Args:
        objective: What is minimised besides; None takes CE on the images that come before the
            views.
        features: Watching the model that is trained.
        weight: lambda.
        temperature: tau.
    """

    def __init__(
        self,
        objective: Objective | None,
        features: HeadInputs,
        *,
        weight: float,
        temperature: float,
    ):
        self.objective, self.features = objective, features
        self.weight, self.temperature = weight, temperature

    @property
    def moves_weights(self) -> bool:
        """Whether the objective does."""
        return getattr(self.objective, "moves_weights", False)

    @property
    def parts(self) -> tuple[str, ...]:
        """Those of the objective, and the views."""
        return (*(self.objective.parts if self.objective else ()), VIEWS)

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """One forward over all views, after that of the objective."""
        base = self.objective(forward, batches) if self.objective else None
        views = batches[VIEWS]
        logits = forward(views)
        assert self.features.latest is not None
        count = 0 if base else len(views) // 3
        contrast = nt_xent(self.features.latest[count:], self.temperature)
        if base is None:
            loss = F.cross_entropy(wide(logits[:count]), views.labels[:count])
            base = ObjectiveValue(loss, {"retain_loss": loss})
        total = base.total + self.weight * contrast
        return ObjectiveValue(total, {**base.parts, "contrast": contrast})
