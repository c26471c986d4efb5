"""Distances, goals and rule sets of rows, against the reference models of each seed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from stable_forgetting.benchmarks.leaderboard.board import BoardRow, FinalRecords
from stable_forgetting.benchmarks.pipeline.measuring import references
from stable_forgetting.benchmarks.suite.goals import rule_sets
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.measure.gaps import summarise
from stable_forgetting.common.measure.goal import References, Role
from stable_forgetting.common.measure.metric import Row
from stable_forgetting.common.measure.rules import Rule
from stable_forgetting.common.store.records import RunRecord

ROLES: tuple[Role, ...] = ("original", "retrain")


def label_of(suite: ResolvedSuite, role: Role) -> str:
    """The row label of a reference model; the role itself where the suite has no such row."""
    return next((row.label for row in suite.rows if row.method == role), role)


def finals_of(records: Iterable[tuple[str, RunRecord]]) -> FinalRecords:
    """The records of final models by row, replicate and seed."""
    finals: FinalRecords = {}
    for label, record in records:
        finals.setdefault((label, record.replicate), {})[record.seed] = record
    return finals


class Judge:
    """Judges rows by the benchmark's rule and the suite's rule sets.

    Attributes:
        references: Seed -> metrics of its reference models.
    """

    def __init__(self, suite: ResolvedSuite, rule: Rule, finals: FinalRecords):
        self.suite, self.rule = suite, rule
        self._sets = rule_sets(suite.spec)
        by_role = {role: finals.get((label_of(suite, role), 0), {}) for role in ROLES}
        self.references: Mapping[int, References] = defaultdict(
            References,
            {
                seed: references({role: by_role[role].get(seed) for role in ROLES})
                for seed in {seed for by_seed in by_role.values() for seed in by_seed}
            },
        )

    def judge(self, row: BoardRow, metrics: Mapping[int, Row]) -> None:
        """Fills in a row's distances, reached goals and criteria.

        ``metrics`` holds those of the seeds that did not diverge.
        """
        comparable, parts = 0, []
        for seed, own in metrics.items():
            targets = self.references[seed]
            comparable += all(targets.of(role) is not None for role in self.rule.needs)
            distance = self.rule.distance(own, targets, trial=False)
            if distance is not None:
                row.ag_per_seed[seed] = distance
                parts.append(self.rule.contributions(own, targets) or {})
            if self.rule.goals:
                answers = [goal.reached(own, targets) for goal in self.rule.goals]
                unknown = None if None in answers else True
                row.reached[seed] = False if False in answers else unknown
            for name, rules in self._sets.items():
                row.criteria.setdefault(name, {})[seed] = rules.judge(own, targets)
        if row.ag_per_seed and len(row.ag_per_seed) == comparable:
            row.derived["ag"] = summarise(list(row.ag_per_seed.values()))
            row.parts = {m: math.fsum(p[m] for p in parts) / len(parts) for m in parts[0]}
            for axis in self.rule.axes:
                values = [math.fsum(p.get(m, 0.0) for m in axis.weights) for p in parts]
                row.derived[axis.name] = summarise([len(self.rule.axes) * v for v in values])
