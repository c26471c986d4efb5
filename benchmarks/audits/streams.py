"""Streams of forget requests: the stages of the ``sequential`` audit."""

from __future__ import annotations

from benchmarks.audits.plan import AuditPlanner
from benchmarks.pipeline.stage import Plan, Result, Stage
from benchmarks.spec.resolve import ResolvedRow
from common.base.registry import METHODS


def stream(
    planner: AuditPlanner, row: ResolvedRow, seed: int, count: int, replicate: int = 0
) -> list[Stage] | None:
    """The evaluated models after each request; None while the row's config is undecided.

    Retrain is trained anew for every request but the last, whose retain set is the suite's.

    Args:
        planner: Of the suite.
        row: Of the suite.
        seed: Of the run.
        count: Requests that the forget set is divided into.
        replicate: Which further Retrain, for the noise floor.
    """
    config, lineage = planner.config_of(row), planner.lineage
    if config is None:
        return None
    model, stages = lineage.original(seed), []
    for index in range(count):
        split = lineage.split(seed, request=(index, count))
        if row.method == "retrain":
            last = index == count - 1
            model = lineage.retrain(seed, replicate, None if last else split)
        elif METHODS[row.method].info.changes_model:
            model = lineage.unlearned(row, config, seed, start=model, split=split, note=split.name)
        stages.append(lineage.evaluated(model, seed, replicate, split=split))
    return stages


def stream_plan(planner: AuditPlanner, count: int) -> Plan:
    """The streams of every row and seed, and of as many Retrains as give a floor."""
    suite = planner.suite
    plan = Plan(suite)
    for seed in suite.spec.seeds:
        for row in suite.rows:
            twice = row.method == "retrain" and suite.spec.retrains > 1
            for replicate in range(2 if twice else 1):
                stages = stream(planner, row, seed, count, replicate)
                if stages is None:
                    plan.waiting.append(row.label)
                for stage in stages or ():
                    plan.results.append(Result(row.label, seed, replicate, None, stage))
    return plan
