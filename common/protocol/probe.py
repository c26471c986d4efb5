"""Probes: a table of one model on data of the probe's own.

A benchmark's metrics read the scores of its parts.  A probe brings its own data: reasoning tasks,
dialogue, perplexity of another corpus.  Each probe is a stage of its own with a version of its own,
so that a changed probe re-runs nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.base.config import Strict, validate
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import listing
from stable_forgetting.common.base.registry import Registry
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.protocol.benchmark import Benchmark

if TYPE_CHECKING:
    from torch import nn

PROBES: Registry[Any] = Registry("probe", "stable_forgetting.common.protocol.probe:Probe")
PROBES.register(
    "ceiling",
    "stable_forgetting.common.probes.ceiling:CeilingProbe",
    summary="largest cross-entropy that a frozen last normalisation and head allow",
)


@dataclass(frozen=True)
class ProbeTable:
    """What a probe measured of one model.

    Attributes:
        rows: Row (such as a task) -> column -> value; None where it is undefined.
        notes: What the numbers depend on: versions, hashes, sizes, by name.
    """

    rows: Mapping[str, Mapping[str, float | None]]
    notes: Mapping[str, Any] = field(default_factory=dict)


class Probe(ABC):
    """Measures one model on the probe's own data.

    Importing a subclass's module must not import torch.

    Attributes:
        version: Raised when the same config would give other numbers.
        modality: The models that it can measure; empty for all.
    """

    version: ClassVar[int]
    Config: ClassVar[type[Strict]]
    modality: ClassVar[str] = ""

    def __init__(self, name: str, config: Any):
        self.name = name
        self.config = config

    @classmethod
    def inapplicable(cls, modality: str) -> str | None:
        """Why the probe cannot measure models of a modality; None where it can."""
        return f"for {cls.modality} only" if cls.modality not in ("", modality) else None

    @property
    def files(self) -> Mapping[str, str]:
        """Row -> file that it reads, below the data root or absolute; none by default."""
        return {}

    @property
    def otherwise(self) -> str:
        """What else a user without the files may do, for the error; begins with a comma."""
        return ""

    def file(self, row: str, data_root: Path | None) -> Path:
        """The file of a row, plain or gzipped.

        Raises:
            DataError: It is not there.
        """
        path = (data_root or Path()) / self.files[row]
        for each in (path, path.with_name(f"{path.name}.gz")):
            if each.is_file():
                return each
        raise DataError(
            f"{self.name}.{row}: there is no {path} (nor {path.name}.gz); give the folder that"
            f" holds {self.files[row]} as --data-root (data_root=){self.otherwise}"
        )

    def require(self, data_root: Path | None) -> None:
        """Checks that the files are there, before anything is trained.

        Raises:
            DataError: One is missing.
        """
        for row in self.files:
            self.file(row, data_root)

    def listing(self, data_root: Path | None) -> str:
        """What changes with its files, unread; empty where it has none, or one is missing."""
        try:
            return listing([self.file(row, data_root) for row in self.files])
        except DataError:
            return ""

    @abstractmethod
    def measure(self, model: nn.Module, benchmark: Benchmark) -> ProbeTable:
        """The table of a model in eval mode."""

    @abstractmethod
    def summary(self, table: ProbeTable) -> dict[str, float | None]:
        """Metric -> value: what the leaderboard shows of a table, named in :attr:`metrics`."""

    def related(self, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """Further metrics, from those of the model and of :meth:`summary`; none by default."""
        return {}

    @property
    @abstractmethod
    def metrics(self) -> tuple[MetricSpec, ...]:
        """The metrics of :meth:`summary` and :meth:`related`: the probe's name, a dot, and more."""


def make_probe(
    registered: str, settings: Mapping[str, Any] | None, origin: str, *, name: str = ""
) -> Probe:
    """A probe with its config.

    Raises:
        ConfigError: An unknown probe or setting.
    """
    cls = PROBES[registered]
    probe: Probe = cls(name or registered, validate(cls.Config, settings or {}, origin))
    return probe
