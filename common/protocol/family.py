"""What a modality says of its models: the names of their layers, their logits, how they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.data.batch import Batch
    from stable_forgetting.common.measure.ceiling import LastLayers


class LayerNames(Protocol):
    """What the layers of an architecture are called."""

    @property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """Adapter target patterns by placement (``mlp``, ``attention``, ``all``)."""

    @property
    def head(self) -> Sequence[str]:
        """Parameter-name patterns of the classifier head."""

    def component_of(self, parameter: str, /) -> str:
        """Component (mlp, attention, head, other) of a parameter, by its dotted name."""


def among(layers: Sequence[str]) -> str:
    """The end of an error about a placement: which layers there are to choose from."""
    return f" among {', '.join(layers)}" if layers else ""


class ModelFamily(ABC):
    """What methods must know of the models they are given."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Width of the logits."""

    @property
    @abstractmethod
    def family(self) -> LayerNames:
        """What the layers are called."""

    @property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """The family's target patterns."""
        return self.family.targets

    @property
    def layers(self) -> Sequence[str]:
        """Patterns of the layers that there are to adapt, where the family knows them."""
        return getattr(self.family, "layers", ())

    @property
    def head(self) -> Sequence[str]:
        """The family's head patterns."""
        return self.family.head

    def component_of(self, name: str) -> str:
        """The family's component of a parameter."""
        return self.family.component_of(name)

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits aligned with the batch's labels."""

    def last_layers(self, model: nn.Module) -> LastLayers | None:
        """A model's last normalisation and its linear head; None where it ends otherwise."""
        return None
