"""What a leaderboard holds: rows, trials, comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stable_forgetting.benchmarks.audits.after import Shown
from stable_forgetting.benchmarks.audits.derive import AuditTable
from stable_forgetting.benchmarks.audits.stored import StoredPlan
from stable_forgetting.benchmarks.pipeline.stage import Placed
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.benchmarks.sweeps.board import Sweep
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.measure.gaps import Floor, PairedDifference, Summary
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.measure.rules import Rule
from stable_forgetting.common.measure.verdict import Verdict
from stable_forgetting.common.store.records import RunRecord

FinalRecords = dict[tuple[str, int], dict[int, RunRecord]]
"""(label, replicate) -> seed -> record."""


Noisy = Mapping[str, tuple[float, float]]
"""Metric -> how far two Retrains lie apart in it, and the methods from Retrain."""


class Worst(NamedTuple):
    """The column in which a row is furthest: its distance over the second Retrain's."""

    ratio: float
    metric: str


class Rank(NamedTuple):
    """A rank from 1, ties sharing the best, and where it lies in 95 % of draws."""

    rank: int
    low: int
    high: int


@dataclass
class BoardRow:
    """One row: summaries over the seeds that did not diverge.

    Attributes:
        diverged: seed -> where it diverged.
        metrics: Metric -> summary of measurements.
        gaps: Metric -> summary of signed gaps to the seed's Retrain.
        derived: ``ag``, the distance of the benchmark's rule, and what else it names -> summary.
        ag_per_seed: That distance by seed.
        parts: Metric -> its part of the distance, mean over seeds.
        reached: Seed -> whether every goal is reached; empty where the rule has no goals.
        criteria: Rule set -> seed -> criterion -> whether it holds.
        verdict: Whether the row differs from a retrained model; None if unknown.
        rank: By mean distance; None where the row lacks a seed.
        worst: See :func:`benchmarks.leaderboard.judge.add_worst`; None without a second Retrain.
        dynamics: Logged quantities -> mean over seeds of the last value.
        cost: Cost entries -> mean over seeds.
        chosen: Parameters that tuning chose.
        edges: Those of them that lie at the edge of their grid or range.
        inapplicable: Why the method says nothing about this benchmark; empty where it does.
    """

    label: str
    method: str
    seeds: list[int] = field(default_factory=list)
    diverged: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, Summary] = field(default_factory=dict)
    gaps: dict[str, Summary] = field(default_factory=dict)
    derived: dict[str, Summary] = field(default_factory=dict)
    ag_per_seed: dict[int, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    reached: dict[int, bool | None] = field(default_factory=dict)
    criteria: dict[str, dict[int, Mapping[str, bool | None]]] = field(default_factory=dict)
    verdict: Verdict | None = None
    rank: Rank | None = None
    worst: Worst | None = None
    dynamics: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    trials: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)
    edges: tuple[str, ...] = ()
    inapplicable: str = ""

    @property
    def target(self) -> bool:
        """Whether it is the Retrain that all rows are compared with, whatever it is called."""
        return self.method == "retrain" and self.label != FLOOR


@dataclass(frozen=True)
class Trial:
    """One tuning trial.

    Attributes:
        gap: Validation gap to Retrain, mean over the tuning seeds (infinite if diverged).
    """

    label: str
    params: Mapping[str, Any]
    gap: float
    chosen: bool
    edges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Paired difference of AG between two rows (negative: the first is closer to Retrain).

    Attributes:
        q: The difference's p, corrected for the pairs of the table (Holm); None for one seed.
    """

    first: str
    second: str
    difference: PairedDifference
    q: float | None


@dataclass
class Leaderboard:
    """Everything a table shows.

    Attributes:
        records: (row label, record) of every final model.
        sizes: Seed -> samples in the forget set.
        digest: What tells it apart from others of its name and version.
        missing: Records that are planned and not there.
        plan: Of the suite's stages; None of records that came without a store.
        stages: Row label, replicate and seed -> the stage that wrote the record; none of records
            that came without a store.
        attacked: What the rows show of the forgotten after the suite's own attacks.
        folds: Boards of the folds before the last.
        forgotten: Forget samples of every fold; None where its split is not made.
        tuned_on: What the trials were scored on, in words; empty without tuning.
        sweep: What the cells of the suite's grid say; None without a grid.
        noisy: Columns in which two Retrains lie farther apart than the methods from Retrain; they
            weigh nothing, unless they are all.
        pooled: The floor over all seeds of the protocol in the store, this suite's among them.
    """

    suite: ResolvedSuite
    rule: Rule
    specs: dict[str, MetricSpec]
    rows: list[BoardRow]
    floor: Floor
    comparisons: list[Comparison]
    records: list[tuple[str, RunRecord]]
    sizes: Mapping[int, int]
    digest: str
    missing: int = 0
    trials: list[Trial] = field(default_factory=list)
    stages: Mapping[tuple[str, int, int], Placed] = field(default_factory=dict)
    plan: StoredPlan | None = None
    audits: list[AuditTable] = field(default_factory=list)
    attacked: list[Shown] = field(default_factory=list)
    folds: list[Leaderboard] = field(default_factory=list)
    forgotten: tuple[int | None, ...] = ()
    tuned_on: str = ""
    sweep: Sweep | None = None
    noisy: Noisy = field(default_factory=dict)
    pooled: Floor = field(default_factory=lambda: Floor((), None))

    def stage(self, label: str, record: RunRecord) -> Placed:
        """The stage that wrote a record."""
        return self.stages[label, record.replicate, record.seed]

    @property
    def complete(self) -> bool:
        """Whether every planned record is there."""
        return self.missing == 0


def info_of(method: str) -> Any:
    """Facts about a method; None of a plugin's that is not here."""
    return METHODS[method].info if method in METHODS else None
