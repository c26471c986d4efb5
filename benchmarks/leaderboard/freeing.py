"""What is removed from a store: weights that nothing reads any more, and rows to make again."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator

from stable_forgetting.benchmarks.audits.plan import probe_plan
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.suite.remembered import FILE, remembered
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.store.stages import FREED, StageStore
from stable_forgetting.common.store.weights import WEIGHTS

FILES = (WEIGHTS, "adapter.safetensors")
"""Of a stage's model: whole, or an adapter."""

Weights = list[tuple[Stage, int]]
"""Stages, and the bytes of their weights."""


def freeable(suite: ResolvedSuite, store: StageStore) -> Weights:
    """Complete stages of a suite whose weights no stage reads that is still to do.

    Every suite that was run in the store is asked, as suites share stages; one that cannot be
    read, for example without its plugin, is an error.
    """
    names = sorted(file.parent.name for file in (store.root / "suites").glob(f"*/{FILE}"))
    suites = [suite, *(load_suite(remembered(name, store.root)) for name in names)]
    needed = {
        key for each in suites for plan in _plans(each, store) for key in _needed(plan, store)
    }
    own = {stage.key: stage for plan in _plans(suite, store) for stage in plan.stages()}
    sizes = [(stage, _size(stage, store)) for key, stage in own.items() if key not in needed]
    return [(stage, size) for stage, size in sizes if size]


def free(weights: Weights, store: StageStore) -> None:
    """Deletes the weights of stages on which no other run works; scores and records stay."""
    for stage, _ in weights:
        with store.lease(stage.kind, stage.key) as ours:
            if ours:
                store.free(stage.kind, stage.key, FILES)


def told(weights: Weights) -> str:
    """How much it is, in words."""
    size = sum(size for _, size in weights)
    amount = f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
    return f"{amount} of weights in {len(weights)} stages that no further stage needs"


def _plans(suite: ResolvedSuite, store: StageStore) -> Iterator[Plan]:
    yield make_plan(suite, store)
    if suite.audits:
        yield probe_plan(suite, store)


def _needed(plan: Plan, store: StageStore) -> Iterator[str]:
    """Keys of what a plan's missing stages are made of; of all its stages if rows are undecided."""
    for stage in plan.stages():
        if plan.waiting:
            yield stage.key
        elif store.done(stage.kind, stage.key) is None:
            yield from (parent.key for parent in stage.ancestors())


def _size(stage: Stage, store: StageStore) -> int:
    """Bytes of a complete stage's weights, with those that a kill left while they were freed."""
    done = store.done(stage.kind, stage.key) or {}
    folder = store.folder(stage.kind, stage.key)
    known = {*done.get("files", {}), *done.get(FREED, {})}
    held = [folder / name for name in FILES if name in known]
    return sum(path.stat().st_size for path in held if path.is_file())


def remove_rows(suite: ResolvedSuite, labels: Collection[str], store: StageStore) -> int:
    """Removes all that was made for rows, from trials to audits; counts the stages.

    Splits and models that they start from stay.
    """
    for label in labels:
        if label not in suite.spec.methods:
            hint = did_you_mean(label, list(suite.spec.methods))
            raise ConfigError(f"--fresh {label}: {suite.name} has no such row{hint}")
    plan = make_plan(suite, store)
    stages = {stage.key: stage for stage in _own(plan, labels)}
    for stage in (*plan.stages(), *probe_plan(suite, store).stages()):
        if stage.kind == "audit" and stage.parents["model"].key in stages:
            stages[stage.key] = stage
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
