"""Leaderboard -> CSV and JSON, for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stable_forgetting.benchmarks.audits.report import to_json as audits_json
from stable_forgetting.benchmarks.leaderboard.board import BoardRow, Leaderboard
from stable_forgetting.benchmarks.leaderboard.folds import to_json as folds_json
from stable_forgetting.benchmarks.leaderboard.settings import first_records
from stable_forgetting.benchmarks.leaderboard.tuning import sources
from stable_forgetting.benchmarks.paper.report import published_json
from stable_forgetting.benchmarks.suite.suite import FLOOR
from stable_forgetting.benchmarks.sweeps.board import to_json as sweep_json
from stable_forgetting.common.measure.gaps import Summary, gap
from stable_forgetting.common.measure.rules import GapRule
from stable_forgetting.common.train.tracking import flat


def row_lines(board: Leaderboard) -> list[dict[str, Any]]:
    """One line per row: distance, metrics and gaps as summaries, and what tuning chose."""
    lines = []
    for row in board.rows:
        if not row.seeds:
            continue
        line: dict[str, Any] = {
            "row": row.label,
            "method": row.method,
            "seeds": len(row.seeds),
            "diverged": len(row.diverged),
            "verdict": row.verdict and row.verdict.word,
            "rank": row.rank and row.rank.rank,
            "worst": row.worst and row.worst.ratio,
            "worst_column": row.worst and row.worst.metric,
            "trials": row.trials or None,
            **_columns("distance", row.derived.get("ag")),
        }
        for name in [*(axis.name for axis in board.rule.axes), *(c.name for c in board.rule.also)]:
            line |= _columns(name, row.derived.get(name))
        for name in board.specs:
            line |= _columns(name, row.metrics.get(name))
            line |= _columns(f"gap.{name}", row.gaps.get(name))
        lines.append(line | {f"chosen.{name}": value for name, value in row.chosen.items()})
    return lines


def _columns(name: str, summary: Summary | None) -> dict[str, float | None]:
    values = {} if summary is None else vars(summary)
    ends = {f"{name}_{end}": values.get(end) for end in ("std", "low", "high")}
    return {name: values.get("mean"), **ends}


def run_lines(board: Leaderboard) -> list[dict[str, Any]]:
    """One line per run: distance, every metric, its gap to the seed's Retrain, and the config."""
    distances = {row.label: row.ag_per_seed for row in board.rows}
    retrains = {r.seed: r for _, r in board.records if r.method == "retrain" and not r.replicate}
    lines = []
    for label, record in board.records:
        row = {0: label, 1: FLOOR}.get(record.replicate, "")
        target = retrains.get(record.seed)
        gaps = {n: target and gap(record.metrics, target.metrics, n) for n in board.specs}
        lines.append(
            {
                "row": label,
                "method": record.method,
                "seed": record.seed,
                "replicate": record.replicate,
                "status": record.status,
                "split": record.split.get("digest"),
                "distance": distances.get(row, {}).get(record.seed),
                **{name: record.metrics.get(name) for name in board.specs},
                **{f"gap.{name}": value for name, value in gaps.items()},
                **{f"config.{name}": value for name, value in flat(record.params).items()},
            }
        )
    return lines


def to_json(board: Leaderboard) -> dict[str, Any]:
    """Everything as plain numbers."""
    floor, pooled = board.floor.summary, board.pooled.summary
    weights: dict[str, Any] = {}
    if isinstance(board.rule, GapRule):
        weights["weights"] = {**dict.fromkeys(board.noisy, 0.0), **board.rule.weights()}
    return {
        "suite": board.suite.name,
        "version": board.suite.spec.version,
        "digest": board.digest,
        "kind": "measured",
        "complete": board.complete,
        "date": max((record.created for _, record in board.records), default="")[:10],
        "distance": {
            "title": board.rule.title,
            "unit": board.rule.unit,
            **weights,
        },
        "floor": None if floor is None else {**vars(floor), "per_seed": board.floor.per_seed},
        "pooled_floor": None if pooled is None else vars(pooled),
        "rows": [_row(row) for row in board.rows],
        "tuning": _tuning(board),
        "audits": audits_json(board.audits),
        **({"after_attack": [row.to_json() for row in board.attacked]} if board.attacked else {}),
        "published": published_json(board.suite.spec.published),
        "settings": {label: record.params for label, record in first_records(board).items()},
        **({"folds": folds_json(board)} if board.suite.spec.folds else {}),
        **({"sweep": sweep_json(board.sweep)} if board.sweep else {}),
    }


def _row(row: BoardRow) -> dict[str, Any]:
    return {
        "row": row.label,
        "method": row.method,
        "seeds": row.seeds,
        "diverged": {str(seed): detail for seed, detail in row.diverged.items()},
        "inapplicable": row.inapplicable or None,
        "verdict": row.verdict and {"word": row.verdict.word, **asdict(row.verdict)},
        "rank": row.rank and row.rank._asdict(),
        "worst": row.worst and row.worst._asdict(),
        "metrics": _summaries(row.metrics),
        "gaps": _summaries(row.gaps),
        "derived": _summaries(row.derived),
        "parts": row.parts,
        "ag_per_seed": {str(seed): value for seed, value in row.ag_per_seed.items()},
        "dynamics": row.dynamics,
        "cost": row.cost,
        "trials": row.trials,
        "chosen": row.chosen,
        "edges": list(row.edges),
    }


def _summaries(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    return {name: vars(summary) for name, summary in summaries.items()}


def _tuning(board: Leaderboard) -> dict[str, Any] | None:
    """The whole sweep; an infinite gap (diverged) is None."""
    tune = board.suite.spec.tune
    if tune is None:
        return None
    count = "trials_per_row" if tune.trials else "trials_per_dimension"
    return {
        "seeds": list(tune.seeds),
        count: tune.trials or tune.trials_per_dimension,
        **({} if tune.select == "retrain" else {"select": tune.select}),
        "sources": [
            {"rows": rows, "sampler": sampler, "from": space}
            for rows, sampler, space in sources(board.suite)
        ],
        "sweep": [
            {
                "row": trial.label,
                "params": dict(trial.params),
                "gap": trial.gap if math.isfinite(trial.gap) else None,
                "chosen": trial.chosen,
                "edges": list(trial.edges),
            }
            for trial in board.trials
        ],
    }
