"""What an application needs of a modality: a user's model and data, found, loaded, measured."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.protocol.family import ModelFamily

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from stable_forgetting.common.base.config import Strict
    from stable_forgetting.common.data.batch import Source


@dataclass(frozen=True)
class Application:
    """What to unlearn from what, and how.

    What the model and the samples may be is up to the kinds of
    :class:`common.protocol.subject.Subject`: a path, or an object in memory.

    Attributes:
        model: The trained model.
        forget: What to forget.
        method: Registered method, or several with commas between, of which one is chosen.
        out: Folder to make, which must not exist or be empty; None writes nothing.
        retain: What to keep, in the form of ``forget``; needed by methods that read it.
        test: What the model never saw, in the form of ``forget``; for the statement only.
        preset: Named overrides of the method.
        params: Overrides of the method's config, ``key.sub=value`` or nested.
        seed: Of the run.
        options: Settings of one kind of subject, named in its ``options``.
        device: Torch device name; ``auto`` takes the first accelerator.
        threads: Torch threads; None leaves them.
        anyway: Go on where the given model does not seem to fit the samples.
        goal: What the yardstick on forget data should come to, in percent, for the choice among
            several methods; 0 where that follows from the request.
        audits: What is tried on the unlearned model; ``relearn``.
    """

    model: Path | nn.Module
    forget: Any
    method: str
    out: Path | None = None
    retain: Any = None
    test: Any = None
    preset: str | None = None
    params: tuple[str, ...] | Mapping[str, Any] = ()
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    threads: int | None = 1
    anyway: bool = False
    goal: float | None = None
    audits: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The registered methods."""
        return tuple(dict.fromkeys(name.strip() for name in self.method.split(",")))

    @property
    def given(self) -> dict[str, Any]:
        """Role (``forget``, ``retain``, ``test``) -> path or data set, of the roles given."""
        samples = {"forget": self.forget, "retain": self.retain, "test": self.test}
        return {role: given for role, given in samples.items() if given is not None}


def first_of(samples: Any, role: str = "forget") -> Any:
    """The first sample of a map-style data set.

    Raises:
        DataError: It has no length, or no samples.
    """
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise DataError(f"{role}: give a data set with a length, such as list(data)")
    if not len(samples):
        raise DataError(f"{role}: holds no samples; give one or more")
    return samples[0]


class Subject(ModelFamily):
    """A user's model and what it is to forget.

    Making one checks what needs no model; :meth:`load` does the rest.  Whatever a user can mend is
    raised by one of the two, before anything is trained.

    Attributes:
        modality: Of the benchmarks that run the same methods.
        kind: The name under which it is registered in ``SUBJECTS``.
        unit: What one sample is called, in the plural.
        form: What the samples lie in, for messages.
        options: Settings of an application that are for this kind alone.
        yardstick: The number that people read as "it has forgotten"; a key of ``measures``.
        measures: What :meth:`measured` says of a part, or of the model -> what a table calls it.
        library: What loads the written model, for its card.
        pipeline: The hub's name of the task, for the card.
        original: The given model, in eval mode; after :meth:`load`.
        source: The samples; after :meth:`load`.
        parts: Role -> indices into the source; after :meth:`load`.
    """

    modality: ClassVar[str]
    kind: ClassVar[str]
    unit: ClassVar[str]
    form: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    yardstick: ClassVar[str]
    measures: ClassVar[Mapping[str, str]]
    library: ClassVar[str]
    pipeline: ClassVar[str]
    original: nn.Module
    source: Source
    parts: Mapping[str, np.ndarray]

    def __init__(self, application: Application):
        self.application = application

    @classmethod
    @abstractmethod
    def takes(cls, forget: Any) -> bool:
        """Whether what is to be forgotten has this kind's form."""

    @property
    @abstractmethod
    def scenario(self) -> str | None:
        """What kind of forgetting this is, for methods that apply to some only, if it is known."""

    @abstractmethod
    def load(self, device: torch.device, configs: Sequence[Strict]) -> None:
        """Builds the model and reads the samples.

        Args:
            device: Where to.
            configs: Of the methods, to refuse what this model cannot take.
        """

    @abstractmethod
    def measured(self, model: nn.Module, parts: Collection[str] = ()) -> dict[str, Any]:
        """What is measured of a model, part by part.

        Args:
            model: The given or the unlearned one.
            parts: The parts that may be looked at; all when empty.

        Raises:
            Diverged: An output is not finite.
        """

    def doubt(self, before: Mapping[str, Any]) -> str:
        """Why the given model does not seem to fit the samples; empty where it does.

        Args:
            before: What was measured of it.
        """
        return ""

    @property
    def stored_types(self) -> Mapping[str, torch.dtype]:
        """Name -> type in which a tensor is written, where that is not the model's own."""
        return {}

    @property
    @abstractmethod
    def weights(self) -> Path:
        """Where the given weights lie, for messages."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The statement's ``input``, ``data``, and what else tells this application from others."""

    @abstractmethod
    def write(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        """Writes the model as it was given, with new weights.

        Returns:
            The statement's ``output``.
        """

    @abstractmethod
    def outcome(self, statement: Mapping[str, Any]) -> list[str]:
        """What the measurements say, in plain words."""
