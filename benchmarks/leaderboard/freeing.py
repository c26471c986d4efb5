"""Stored weights that nothing reads any more: their scores, records and facts stay."""

from __future__ import annotations

from collections.abc import Iterator

from stable_forgetting.benchmarks.audits.plan import probe_plan
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.suite.remembered import FILE
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.store.weights import WEIGHTS

FILES = (WEIGHTS, "adapter.safetensors")
"""Of a stage's model: whole, or an adapter."""


Weights = list[tuple[Stage, int]]
"""Stages, and the bytes of their weights."""


def freeable(suite: ResolvedSuite, store: StageStore) -> Weights:
    """Complete stages of a suite whose weights no stage reads that is still to do.

    Every suite that was run in the store is asked, as suites share stages.

    Raises:
        ConfigError: One of them cannot be read, for example without its plugin.
    """
    files = sorted((store.root / "suites").glob(f"*/{FILE}"))
    suites = [suite, *(load_suite(str(file)) for file in files)]
    needed = {
        key for each in suites for plan in _plans(each, store) for key in _needed(plan, store)
    }
    own = {stage.key: stage for plan in _plans(suite, store) for stage in plan.stages()}
    sizes = [(stage, _size(stage, store)) for key, stage in own.items() if key not in needed]
    return [(stage, size) for stage, size in sizes if size]


def free(weights: Weights, store: StageStore) -> None:
    """Deletes the weights of stages on which no other run works."""
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
            yield from _ancestors(stage)


def _ancestors(stage: Stage) -> Iterator[str]:
    for parent in stage.parents.values():
        yield parent.key
        yield from _ancestors(parent)


def _size(stage: Stage, store: StageStore) -> int:
    """Bytes of a complete stage's weights."""
    done = store.done(stage.kind, stage.key) or {}
    folder = store.folder(stage.kind, stage.key)
    held = [folder / name for name in FILES if name in done.get("files", {})]
    return sum(path.stat().st_size for path in held if path.is_file())
