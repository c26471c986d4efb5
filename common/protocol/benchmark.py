"""The protocol object: what a modality must provide so that the harness can run it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stable_forgetting.common import data
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.data.parts import PARTS, Part, Role, part_of
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.measure.metric import MetricSpec, SweepAxes
from stable_forgetting.common.measure.rules import Rule, RuleSet, TargetRule
from stable_forgetting.common.measure.scores import Scores, collect, collect_correct
from stable_forgetting.common.protocol.family import ModelFamily
from stable_forgetting.common.protocol.sizes import StandIn, Workload
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Runtime:
    """What does not change numbers, and is therefore never hashed.

    Attributes:
        store: Root folder of everything written.
        data_root: Where local data lie, if anywhere.
        device: Torch device name; ``auto`` takes the first accelerator.
        threads: Torch threads of each process.
        plugins: Plugin files that every process loads.
    """

    store: Path = Path("runs")
    data_root: Path | None = None
    device: str = "auto"
    threads: int = 1
    plugins: tuple[str, ...] = ()


def pick_device(name: str) -> str:
    """A torch device name; ``auto`` is this process's accelerator, or the CPU."""
    import torch

    if name != "auto":
        return name
    rank = os.environ.get("LOCAL_RANK", "0")
    return f"cuda:{rank}" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> None:
    """Raises ConfigError where torch has no such device here."""
    if name == "auto":
        return
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        raise ConfigError(
            f"--device {name}: not a device that torch has here; use auto, cpu, cuda or cuda:N"
        ) from None


@dataclass(frozen=True)
class Versions:
    """Versions of what a benchmark does, each from 1; each is hashed into its own stages only.

    Attributes:
        split: Raised when the same seed would give other index sets.
        train: Raised when Original and Retrain would come out otherwise.
        unlearn: Raised when a method would be given other batches.
        score: Raised when the same model would get other scores.
        measure: Raised when the same scores would give other metrics.
    """

    split: int = 1
    train: int = 1
    unlearn: int = 1
    score: int = 1
    measure: int = 1


class Benchmark(ModelFamily):
    """One protocol: data, model, scenario, training recipe, evaluation.

    Importing a subclass's module must not import torch; constructing it may.
    """

    versions: ClassVar[Versions] = Versions()
    metrics: ClassVar[tuple[MetricSpec, ...]]
    gap: ClassVar[Rule]
    rule_sets: ClassVar[tuple[RuleSet, ...]] = ()
    """Pass-or-fail rules of papers, which a suite may name under ``rules``."""
    answer_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics of :meth:`compare` that are distances per sample; a verdict takes the first."""
    monitor: ClassVar[tuple[str, ...]] = ()
    """The parts that are scored while a method trains; all when empty."""
    sweep_axes: ClassVar[SweepAxes | None] = None
    Config: ClassVar[type[Strict]]
    modality: ClassVar[str] = ""
    part_table: ClassVar[Mapping[str, Part]] = PARTS
    """What each part of a split is for; a benchmark with further parts adds them."""

    def __init__(self, config: Any, runtime: Runtime):
        self.config = config
        self.runtime = runtime

    @classmethod
    @abstractmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """The part of the config that a stage of ``kind`` depends on (it is hashed).

        Kinds: ``split``, ``train`` (Original and Retrain), ``score`` (a model's scores) and
        ``measure`` (the metrics of stored scores, beside what is in ``score`` already).
        """

    @classmethod
    def pretraining(cls, config: Any) -> Any:
        """The protocol of the pretraining that trainings start from; None without one."""
        return None

    @classmethod
    def gap_of(cls, config: Any) -> Rule:
        """The rule for one protocol: only metrics that its data can give."""
        return cls.gap

    @classmethod
    def without_retrain(cls, config: Any) -> TargetRule | None:
        """How tuning orders trials without a Retrain; None where no data stand for it.

        The rule reads only what a trial measures and what Original says of data that it never saw.
        """
        return None

    @classmethod
    def role_of(cls, part: str) -> Role:
        """What a part may be used for.

        Raises:
            DataError: :attr:`part_table` does not have it.
        """
        return part_of(part, cls.part_table).role

    @classmethod
    def of_goal(cls, part: str) -> bool:
        """Whether a part is scored on Original alone, since it gives a goal its value."""
        return part_of(part, cls.part_table).original

    @classmethod
    def listing(cls, config: Any, runtime: Runtime) -> str:
        """What changes with files of data and weights, without reading them; empty without any."""
        return ""

    @classmethod
    def scenario_of(cls, config: Any) -> str:
        """Name of the scenario as far as the config alone tells it, else empty.

        Planning asks, so that a method which is not for this scenario is not run at all.
        """
        return ""

    @classmethod
    def adapter_share(cls, config: Any, adapter: AdapterConfig) -> tuple[int, int] | None:
        """(parameters of an adapter, parameters of the model without it), counted.

        None where the model's sizes are not known without fetching anything.
        """
        return None

    @classmethod
    def workload(cls, config: Any) -> Workload | None:
        """What planning derives hours and memory from; None where the config does not tell."""
        return None

    @classmethod
    def stand_in(cls, config: Any, runtime: Runtime, folder: Path) -> StandIn:
        """A small protocol of the same kind, for a rehearsal; the config itself by default.

        ``runtime`` says where local data lie; files that the stand-in needs go to ``folder``.
        """
        return StandIn(config)

    @property
    @abstractmethod
    def scenario(self) -> str:
        """Name of the scenario, for methods that apply to some only."""

    @property
    @abstractmethod
    def source(self) -> data.Source:
        """The data."""

    @property
    @abstractmethod
    def provenance(self) -> str:
        """Where the data came from, in words; goes into records."""

    @property
    @abstractmethod
    def recipe(self) -> FitConfig:
        """How Original and Retrain are trained."""

    @property
    def paired_with(self) -> Mapping[str, str]:
        """Part -> the part whose batches its own go beside, sample by sample; none by default."""
        return {}

    @property
    def minimum_train_accuracy(self) -> float:
        """An Original below this (percent) is not unlearned."""
        return 0.0

    @abstractmethod
    def split(self, seed: int) -> ForgetSplit:
        """The frozen index sets of a seed."""

    @abstractmethod
    def build(self, seed: int) -> nn.Module:
        """A model before training, on the runtime's device."""

    @abstractmethod
    def blank(self) -> nn.Module:
        """The architecture alone, ready to receive stored weights."""

    def published(self, role: str) -> nn.Module | None:
        """A trained Original or Retrain that the config names, to take instead of training one."""
        return None

    def published_claim(self, role: str) -> str | None:
        """What a published model's metadata claim as the digest of its training indices.

        Returns:
            None where nothing is claimed: what it was trained on can only be assumed.
        """
        return None

    @abstractmethod
    def parts(self, split: ForgetSplit, *, trial: bool, seed: int) -> dict[str, np.ndarray]:
        """Index sets to score.  A trial never includes test data."""

    @abstractmethod
    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """Measurements of one model, from stored scores alone.

        Nothing here refers to another model.  A trial's scores hold no softmax (``probs``).
        """

    def redrawn(self, scores: Mapping[str, Scores], *, seed: int) -> dict[str, float | None]:
        """The metrics of a report that draw samples, with another ``seed`` of the draws."""
        return {}

    def monitored(self, scores: Mapping[str, Scores], *, seed: int) -> dict[str, float | None]:
        """Measurements during a training, from the scores of the :attr:`monitor` parts alone."""
        return self.evaluate(scores, trial=False, seed=seed)

    def watch(
        self, model: nn.Module, parts: Mapping[str, np.ndarray], limits: Mapping[str, float]
    ) -> dict[str, Scores]:
        """Scores of the :attr:`monitor` parts of a model in training.

        Override it where a dear measurement may wait until the others are below their limits.
        """
        return self.score(model, parts)

    def sweep_metrics(self, scores: Mapping[str, Scores], *, seed: int) -> dict[str, float | None]:
        """The metrics of :attr:`sweep_axes`.  Override it where they are cheaper alone.

        Raises:
            Diverged: A score is not finite.
        """
        assert self.sweep_axes is not None, "a benchmark without sweep_axes has no sweep"
        metrics = self.evaluate(scores, trial=False, seed=seed)
        return {name: metrics.get(name) for name in self.sweep_axes.metrics}

    @classmethod
    def compare(
        cls, config: Any, scores: Mapping[str, Scores], target: Mapping[str, Scores]
    ) -> dict[str, float | None]:
        """Metrics that need the retrained model's scores too, such as a test of equality.

        Derived when a table is made, never stored; named in :attr:`metrics` like the others.
        """
        return {}

    @classmethod
    def choices(cls, scores: Scores) -> np.ndarray | None:
        """(N, C) distributions over the answers that each sample has to choose from, if any.

        Stored scores -> the softmax over classes.  Override it where every sample brings answers of
        its own.
        """
        return scores.probs

    def score(
        self, model: nn.Module, parts: Mapping[str, np.ndarray], *, trial: bool = False
    ) -> dict[str, Scores]:
        """Scores of every part; a trial may leave out what tuning does not read.

        Override it where one pass over all parts is cheaper.
        """
        return {name: self.collect(model, indices) for name, indices in parts.items()}

    def collect(self, model: nn.Module, indices: np.ndarray) -> Scores:
        """One pass over an index set."""
        scores: Scores = self._read(collect, model, indices)
        return scores

    def collect_correct(self, model: nn.Module, indices: np.ndarray) -> np.ndarray:
        """(N,) float32 ``correct`` of :meth:`collect`, bit for bit, without the other scores."""
        correct: np.ndarray = self._read(collect_correct, model, indices)
        return correct

    def _read(
        self,
        reader: Callable[[data.Forward, Iterable[data.Batch]], Any],
        model: nn.Module,
        indices: np.ndarray,
    ) -> Any:
        from stable_forgetting.common.bounded.layer import reuse_weights

        model.eval()
        batches = data.ordered_batches(self.source, indices, self.evaluation_batch)
        forward: Callable[[data.Batch], Tensor] = lambda batch: self.forward(model, batch)  # noqa: E731
        with reuse_weights(model):
            return reader(forward, batches)

    @property
    def evaluation_batch(self) -> int:
        """Samples per forward in evaluation."""
        return 256
