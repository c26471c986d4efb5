"""A stage, its content-addressed key, and a plan: the stages of one job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.tune import Draw
from stable_forgetting.common.base.config import Strict, canonical, digest
from stable_forgetting.common.base.registry import plugin_code
from stable_forgetting.common.store.stages import ENGINE_VERSION
from stable_forgetting.common.train.rehearsal import Rehearsal

ASSUMED = "assumed"
"""Training data of a published model that says nothing of them."""

REFERRED = "weights_sha256"
"""Fact of a stage whose published weights stay where they are: their digest."""

PRETRAINED = "pretrained"
"""Role of the pretraining that Original and Retrain start from."""


class StageSpec(Strict):
    """What every stage needs besides its parents; each kind adds its own fields.

    Attributes:
        protocol: The benchmark's config, as plain values.
        rehearsal: How much of it is done, where this is a rehearsal.
    """

    benchmark: str
    protocol: dict[str, Any]
    seed: int
    rehearsal: Rehearsal | None = None


class ModelSpec(StageSpec):
    """A stage that makes a model, or that says something of one.

    Attributes:
        params: Its config, as plain values.
        replicate: 0, or which further model of the same seed this is.
        moved: Whether the last digit of every weight that it starts from is moved.
    """

    method: str
    params: dict[str, Any] = {}
    replicate: int = 0
    moved: bool = False


def foreign_code(kind: str, spec: StageSpec) -> dict[str, list[str]]:
    """What of a stage's identity is code: digests of the plugins that it names; empty without."""
    digests = plugin_code({"kind": kind, "spec": spec})
    return {"plugin_code": digests} if digests else {}


@dataclass(frozen=True)
class Stage:
    """One unit of work.

    Attributes:
        kind: What it does: a name in :data:`benchmarks.pipeline.kinds.KINDS`.
        spec: What the work needs besides the parents; of the kind's ``Spec``.
        identity: What is hashed besides the parents' keys.
        parents: Role -> stage.
        name: For people, such as ``gd_sine/seed-1``.
    """

    kind: str
    spec: StageSpec
    identity: Mapping[str, Any]
    parents: Mapping[str, Stage]
    name: str

    @property
    def start(self) -> Stage | None:
        """The stage whose model this one starts from; None where it starts from none."""
        return self.parents.get("start")

    @property
    def first(self) -> Stage:
        """The reference model at the start of a chain of unlearning requests; often the stage."""
        return self if self.start is None else self.start.first

    @property
    def request(self) -> int:
        """Which of several requests in turn it does, each with draws of its own; 0: the first."""
        request, start = 0, self.start
        while start is not None and start.start is not None:
            request, start = request + 1, start.start
        return request

    def ancestors(self) -> Iterator[Stage]:
        """All that it is made of; what it needs twice comes twice."""
        for parent in self.parents.values():
            yield parent
            yield from parent.ancestors()

    @cached_property
    def key(self) -> str:
        """SHA-256 over identity and parents."""
        parents = {role: stage.key for role, stage in self.parents.items()}
        return digest(
            {
                "kind": self.kind,
                "engine": ENGINE_VERSION,
                "identity": canonical(self.identity),
                "parents": parents,
            }
        )


class Placed(Protocol):
    """What is enough to read a stage's files."""

    @property
    def kind(self) -> str:
        """What it does."""

    @property
    def key(self) -> str:
        """Of its folder."""

    @property
    def parents(self) -> Mapping[str, Placed]:
        """Role -> what it was made of."""


S = TypeVar("S", bound=Placed, covariant=True)


@dataclass(frozen=True)
class Result(Generic[S]):
    """One evaluated model of the suite.

    Attributes:
        replicate: Which further Retrain or shadow; 0 for the first.
        trial: Number of the tuning trial, -1 for a reference model; None outside tuning.
    """

    label: str
    seed: int
    replicate: int
    trial: int | None
    stage: S


@dataclass(frozen=True)
class Probed(Generic[S]):
    """One final model's table of one probe."""

    result: Result[S]
    name: str
    stage: S


@dataclass(frozen=True)
class Block(Generic[S]):
    """Cells of one row and seed that are done together.

    Attributes:
        extension: Whether they lie outside the grid that every row shares, to find an edge.
    """

    label: str
    seed: int
    lrs: tuple[float, ...]
    extension: bool
    stage: S


@dataclass
class Plan:
    """The stages of a suite, as far as the store decides them.

    Attributes:
        results: Every evaluated model, in table order.
        chosen: Row -> the trial that was chosen (index).
        waiting: Rows whose final stages wait for their trials or blocks.
        inapplicable: Rows whose method is not for this benchmark -> why; they have no stages.
        folds: Plans of the folds before the last.
        attacks: Of trials, where tuning looks at what an attack shows.
    """

    suite: ResolvedSuite
    results: list[Result[Stage]] = field(default_factory=list)
    probes: list[Probed[Stage]] = field(default_factory=list)
    draws: dict[str, list[Draw]] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    inapplicable: dict[str, str] = field(default_factory=dict)
    folds: list[Plan] = field(default_factory=list)
    blocks: list[Block[Stage]] = field(default_factory=list)
    attacks: list[Stage] = field(default_factory=list)

    @property
    def undrawn(self) -> int:
        """Evaluated models of trials that are drawn once the rounds before are done."""
        tune = self.suite.spec.tune
        if tune is None:
            return 0
        searches = {row.label: row.search for row in self.suite.rows if row.search}
        left = (searches[label].trials - len(draws) for label, draws in self.draws.items())
        return sum(left) * len(tune.seeds)

    def stages(self) -> Iterator[Stage]:
        """Every stage once, parents before children."""
        seen: set[str] = set()

        def walk(stage: Stage) -> Iterator[Stage]:
            if stage.key in seen:
                return
            for parent in stage.parents.values():
                yield from walk(parent)
            if stage.key not in seen:
                seen.add(stage.key)
                yield stage

        for fold in self.folds:
            for stage in fold.stages():
                yield from walk(stage)
        own = [result.stage for result in self.results] + [entry.stage for entry in self.probes]
        for stage in [*own, *(block.stage for block in self.blocks), *self.attacks]:
            yield from walk(stage)
