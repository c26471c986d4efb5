"""Rows that are made again: what the store holds of them is removed first."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator

from stable_forgetting.benchmarks.audits.plan import probe_plan
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.stages import StageStore


def remove_rows(suite: ResolvedSuite, labels: Collection[str], store: StageStore) -> int:
    """Removes all that was made for rows, from trials to audits; counts the stages.

    Args:
        suite: Of the rows.
        labels: Which rows; splits and models that they start from stay.
        store: What has them.

    Raises:
        ConfigError: No such row, or another run works on it.
    """
    for label in labels:
        if label not in suite.spec.methods:
            hint = did_you_mean(label, list(suite.spec.methods))
            raise ConfigError(f"--fresh {label}: {suite.name} has no such row{hint}")
    plan = make_plan(suite, store)
    stages = {stage.key: stage for stage in _own(plan, labels)}
    if suite.audits:
        audits = probe_plan(suite, store).stages()
        asked = [s for s in audits if s.kind == "audit" and s.parents["model"].key in stages]
        stages |= {stage.key: stage for stage in asked}
    return sum(_remove(stage, store) for stage in stages.values())


def _own(plan: Plan, labels: Collection[str]) -> Iterator[Stage]:
    for fold in plan.folds:
        yield from _own(fold, labels)
    for result in plan.results:
        if result.label in labels:
            yield from (result.stage, result.stage.parents["scores"], result.stage.parents["model"])
    for entry in plan.probes:
        if entry.result.label in labels:
            yield entry.stage
    yield from (block.stage for block in plan.blocks if block.label in labels)


def _remove(stage: Stage, store: StageStore) -> bool:
    """Renames a stage's folder, which counts as not there, and lets the sweep remove it."""
    folder = store.folder(stage.kind, stage.key)
    scratch = store.scratch(stage.kind, stage.key)
    if not (folder.exists() or scratch.exists()):
        return False
    with store.lease(stage.kind, stage.key) as free:
        if not free:
            raise ConfigError(f"--fresh: another run works on {stage.name}; wait for it")
        for path in (folder, scratch):
            if path.exists():
                path.rename(folder.with_name(f".{folder.name}.{secrets.token_hex(4)}"))
    store.sweep()
    return True
