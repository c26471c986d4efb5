"""What an application needs of a modality: a user's model and data, found, loaded, measured."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.protocol.benchmark import Benchmark
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Application:
    """What to unlearn from what, and how.

    What the model and the samples may be is up to the kinds of
    :class:`common.protocol.given.GivenBenchmark`: a path, or an object in memory.

    Attributes:
        method: Registered method, or several with commas between, of which one is chosen.
        out: Folder to make, which must not exist or be empty; None writes nothing.
        retain: What to keep, in the form of ``forget``; needed by methods that read it.
        test: What the model never saw, in the form of ``forget``; for the statement only.
        preset: Named overrides of the method.
        params: Overrides of the method's config, ``key.sub=value`` or nested.
        options: Settings of one kind of benchmark, named in its ``options``.
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
        DataError: It has no length, no samples, or names instead of numbers.
    """
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise DataError(
            f"{role}: give a data set with a length that is read by index: a loader's .dataset, or "
            "list(data)"
        )
    if not len(samples):
        raise DataError(f"{role}: holds no samples; give one or more")
    try:
        return samples[0]
    except KeyError:
        raise DataError(
            f"{role}: is read by name and not by index; give one split (data['train']), or the "
            "rows of a table (table.to_dict('records'))"
        ) from None


class _GivenSplit(ForgetSplit):
    """Index sets of a user's samples: retain may be absent where the method does not read it."""

    def __post_init__(self) -> None:
        """The samples are disjoint by construction and never none."""


class GivenBenchmark(Benchmark):
    """A user's model and samples: a benchmark whose Original is given, and that has no Retrain.

    Making one checks what needs no model; :meth:`prepare` does the rest.  Whatever a user can mend
    is raised by one of the two, before anything is trained.

    Attributes:
        unit: What one sample is called, in the plural.
        form: What the samples lie in, for messages.
        options: Settings of an application that are for this kind alone.
        yardstick: The measure that people read as "it has forgotten".
        card: What the model card says of library and task.
        given: The given model, on disk or in memory: its ``name``; ``weights``, where they lie, for
            messages; ``dtypes``, name -> type in which a tensor is written; ``write(model,
            folder)``, which writes a model as this one was given.
        original: The same in memory, in eval mode; after :meth:`prepare`.
        samples: Role -> indices into the source; after :meth:`prepare`.
    """

    kind: ClassVar[str]
    unit: ClassVar[str]
    form: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    yardstick: ClassVar[str]
    card: ClassVar[Mapping[str, str]]
    config: Application
    given: Any
    original: nn.Module
    samples: Mapping[str, np.ndarray]

    @classmethod
    @abstractmethod
    def takes(cls, forget: Any) -> bool:
        """Whether what is to be forgotten has this kind's form."""

    @abstractmethod
    def prepare(self, device: torch.device, configs: Sequence[Strict]) -> None:
        """Builds the model and reads the samples."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """The statement's ``input``, ``data``, and what else tells this application from others."""

    def doubt(self, before: Mapping[str, Any]) -> str:
        """Why the given model does not seem to fit the samples; empty where it does."""
        return ""

    @abstractmethod
    def outcome(self, statement: Mapping[str, Any]) -> list[str]:
        """What the measurements say, in plain words."""

    # As every benchmark ---------------------------------------------------------------------------

    @classmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """All of it: nothing of an application is shared with another one."""
        return {"application": config}

    @property
    def provenance(self) -> str:
        """The user's own samples."""
        return f"{self.unit} of the user"

    @property
    def recipe(self) -> FitConfig:
        """One epoch: how the given model was trained is not known."""
        return FitConfig(epochs=1)

    def split(self, seed: int) -> ForgetSplit:
        """The given parts; of several methods one is chosen on a ``validation`` part of retain.

        Raises:
            DataError: There are too few retained samples for that.
        """
        held_out = len(self.config.methods) > 1
        samples = _with_validation(self.samples, self.unit) if held_out else self.samples
        return _GivenSplit("apply", samples, self.source.digest)

    def build(self, seed: int) -> nn.Module:
        """Refused: a given model has no start."""
        raise ConfigError("a given model has no start; choose a method that changes a given model")

    def blank(self) -> nn.Module:
        """A copy of the given model; one that is frozen as a whole can be trained."""
        model = copy.deepcopy(self.original)
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        return model.requires_grad_() if frozen else model

    def published(self, role: str) -> nn.Module | None:
        """The given model; there is no Retrain."""
        return self.original if role == "original" else None

    def parts(self, split: ForgetSplit, *, trial: bool, seed: int) -> dict[str, np.ndarray]:
        """All parts; a trial looks at forget and validation alone."""
        return {part: ids for part, ids in split.parts.items() if not trial or part in SEEN}


VALIDATION = "validation"
SEEN = ("forget", VALIDATION)
"""The parts that a choice among methods looks at."""
SHARE = 5
"""One of this many retained samples is held out for it."""


def _with_validation(samples: Mapping[str, np.ndarray], unit: str) -> dict[str, np.ndarray]:
    retain = samples["retain"]
    if len(retain) < 2:
        raise DataError(
            f"retain: one of {SHARE} retained {unit} is held out to choose among methods, "
            f"and there is only {len(retain)}; give more, or one method"
        )
    count = max(1, len(retain) // SHARE)
    held = np.sort(np.asarray(hash_order(retain.tolist(), 0, VALIDATION)[:count], dtype=np.int64))
    return {**samples, "retain": np.setdiff1d(retain, held), VALIDATION: held}
