"""Suite -> plan.  Pure and torch-free: ``unlearn plan`` answers at once.

Rows that are tuned resolve in steps: their trials first, round after round where the sampler looks
at the rounds before, then, once all trials' records exist, the chosen config.  Drawing and choosing
are pure functions of those records and are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stable_forgetting.benchmarks.pipeline.grid import add_grid
from stable_forgetting.benchmarks.pipeline.lineage import Lineage, attacked
from stable_forgetting.benchmarks.pipeline.measuring import (
    read_attack,
    read_record,
    references,
    trial_gap,
)
from stable_forgetting.benchmarks.pipeline.stage import Plan, Probed, Result, Stage
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.benchmarks.suite.tune import SLACK, Draw
from stable_forgetting.common.audits import make_audit
from stable_forgetting.common.audits.base import Measures, ModelAudit
from stable_forgetting.common.base.config import Strict, canonical
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.measure.goal import Role
from stable_forgetting.common.measure.rules import TargetRule
from stable_forgetting.common.store.stages import StageStore


def make_plan(suite: ResolvedSuite, store: StageStore) -> Plan:
    """The plan as far as the store allows."""
    plan = plan_rows(Lineage(suite, store))
    plan.folds = [make_plan(fold, store) for fold in suite.folds]
    return plan


def plan_rows(lineage: Lineage) -> Plan:
    """Every row of a suite for every seed; trials first where a row is tuned.

    Raises:
        ConfigError: No trial of a row gave a finite gap.
    """
    suite = lineage.suite
    plan = Plan(suite)
    for row in suite.rows:
        if row.method in REFERENCES:
            _add_final(plan, lineage, row, row.config)
    for row in suite.rows:
        if row.method in REFERENCES:
            continue
        reason = METHODS[row.method].info.inapplicable(
            scenario=lineage.benchmark.scenario_of(suite.protocol),
            modality=lineage.benchmark.modality,
            in_turn=suite.after is not None,
        )
        if reason is not None:
            plan.inapplicable[row.label] = reason
            continue
        config: Strict | None = row.config
        if row.grid:
            config = add_grid(plan, lineage, row)
        elif row.search:
            config = _tuned(plan, lineage, row)
        if config is not None:
            _add_final(plan, lineage, row, config)
    return plan


def _add_final(plan: Plan, lineage: Lineage, row: ResolvedRow, config: Strict) -> None:
    spec, suite_probes = plan.suite.spec, plan.suite.probes
    for seed in spec.seeds:
        for replicate in range(spec.retrains if row.method == "retrain" else 1):
            if row.method == "original":
                model = lineage.original(seed)
            elif row.method == "retrain":
                model = lineage.retrain(seed, replicate)
            else:
                model = lineage.unlearned(row, config, seed)
            stage = lineage.evaluated(model, seed, replicate)
            result = Result(row.label, seed, replicate, None, stage)
            plan.results.append(result)
            for name in suite_probes:
                plan.probes.append(Probed(result, name, lineage.probed(model, seed, name)))


# Tuning ------------------------------------------------------------------------------------------


def _tuned(plan: Plan, lineage: Lineage, row: ResolvedRow) -> Strict | None:
    """The chosen config; None while trials are missing."""
    assert row.search is not None
    _check_stop(plan, row)
    for seed in row.search.tune.seeds:
        for role, stage in _trial_references(lineage, seed).items():
            if not any(result.stage is stage for result in plan.results):
                plan.results.append(Result(role, seed, 0, -1, stage))
    draws = plan.draws[row.label] = list(row.draws)
    gaps: list[float] = []
    while len(gaps) < len(draws):
        start = len(gaps)
        stages = [
            _add_trial(plan, lineage, row, draw.config, start + index)
            for index, draw in enumerate(draws[start:])
        ]
        new = [gap for per_seed in stages if (gap := _gap(lineage, per_seed)) is not None]
        if len(new) < len(stages):
            plan.waiting.append(row.label)
            return None
        gaps += new
        draws += row.search.more(draws, gaps)
    best, rule = min(range(len(gaps)), key=gaps.__getitem__), plan.suite.trial_rule
    if math.isinf(gaps[best]):
        raise ConfigError(
            f"{plan.suite.name}: row '{row.label}': none of its {len(gaps)} trials has a finite "
            f"gap ({rule.title}); change its tune.grids or tune.spaces, or set tune: false "
            "and give params"
        )
    if row.search.tune.after_attack is not None:
        chosen = _least_shown(plan, lineage, row, draws, gaps)
        if chosen is None:
            plan.waiting.append(row.label)
            return None
        best = chosen
    plan.chosen[row.label] = best
    return draws[best].config


def _check_stop(plan: Plan, row: ResolvedRow) -> None:
    """Refuses a row that stops at Retrain's values where tuning trains none."""
    stop = canonical(row.config).get("stop_below")
    reads = isinstance(stop, Mapping) and "retrain" in stop.values()
    if reads and isinstance(plan.suite.trial_rule, TargetRule):
        raise ConfigError(
            f"{plan.suite.name}: row '{row.label}': stop_below reads Retrain's values, and "
            "tune.select: without_retrain trains none on the tuning seeds; give numbers"
        )


def _least_shown(
    plan: Plan,
    lineage: Lineage,
    row: ResolvedRow,
    draws: Sequence[Draw],
    gaps: Sequence[float],
) -> int | None:
    """Of the trials that are near enough the one that shows least after the attack.

    Ties go to the nearer one; None while an attack is missing.
    """
    assert row.search is not None and row.search.tune.after_attack is not None
    name = row.search.tune.after_attack
    attack = make_audit(name, {}, f"{plan.suite.name}: tune.after_attack")
    assert isinstance(attack, ModelAudit)
    near = [index for index, gap in enumerate(gaps) if gap <= SLACK * min(gaps)]
    shown: dict[int, float] = {}
    for index in near:
        values = []
        for seed in row.search.tune.seeds:
            models = (lineage.unlearned(row, draws[index].config, seed), lineage.retrain(seed))
            stages = [attacked(lineage, m, seed, name, attack, trial=True) for m in models]
            plan.attacks += stages
            ours, theirs = (read_attack(lineage.store, stage) for stage in stages)
            if ours is not None and theirs is not None:
                values.append(_shown(attack, ours, theirs))
        if len(values) == len(row.search.tune.seeds):
            shown[index] = math.fsum(values)
    if len(shown) < len(near):
        return None
    return min(near, key=lambda index: (shown[index], gaps[index]))


def _shown(attack: ModelAudit, ours: Measures | str, theirs: Measures | str) -> float:
    """Points above Retrain, at least 0; infinite where the attack measured nothing."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return math.inf
    value = attack.advantage(ours, theirs)
    return math.inf if value is None else max(0.0, value)


def _trial_references(lineage: Lineage, seed: int) -> dict[Role, Stage]:
    """Role -> evaluated reference model that a trial's distance needs."""
    models = {"original": lineage.original, "retrain": lineage.retrain}
    rule = lineage.suite.trial_rule
    part = rule.part if isinstance(rule, TargetRule) else ""
    split = lineage.split(seed, unseen=part) if part else None
    return {
        role: lineage.evaluated(models[role](seed), seed, split=split, trial=True)
        for role in sorted(rule.needs)
    }


def _add_trial(
    plan: Plan, lineage: Lineage, row: ResolvedRow, config: Strict, index: int
) -> dict[int, Stage]:
    """Seed -> evaluated model of one trial."""
    assert row.search is not None
    stages = {}
    for seed in row.search.tune.seeds:
        model = lineage.unlearned(row, config, seed, note=f"seed-{seed}/trial-{index}")
        stages[seed] = lineage.evaluated(model, seed, trial=True)
        plan.results.append(Result(row.label, seed, 0, index, stages[seed]))
    return stages


def _gap(lineage: Lineage, stages: Mapping[int, Stage]) -> float | None:
    """Sum of a trial's distances over its seeds; None while one is missing."""
    total = 0.0
    for seed, stage in stages.items():
        record = read_record(lineage.store, stage)
        targets = {
            role: read_record(lineage.store, target)
            for role, target in _trial_references(lineage, seed).items()
        }
        if record is None or None in targets.values():
            return None
        total += trial_gap(record, references(targets), lineage.suite.trial_rule)
    return total
