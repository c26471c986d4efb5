"""Leaderboard -> CSV and JSON, for programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.audits.report import to_json as audits_json
from benchmarks.leaderboard.board import BoardRow, Leaderboard
from benchmarks.leaderboard.folds import to_json as folds_json
from benchmarks.leaderboard.sweep import sources
from benchmarks.paper.report import published_json
from benchmarks.spec.remembered import suite_digest
from common.measure.gaps import Summary


def to_csv(board: Leaderboard) -> str:
    """One line per record: label, seed, replicate, status, every metric."""
    names = list(board.specs)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["row", "method", "seed", "replicate", "status", *names])
    for label, record in board.records:
        values = [record.metrics.get(name) for name in names]
        cells = ["" if value is None else repr(value) for value in values]
        run = [label, record.method, record.seed, record.replicate, record.status]
        writer.writerow([*run, *cells])
    return stream.getvalue()


def to_json(board: Leaderboard) -> dict[str, Any]:
    """Everything as plain numbers."""
    floor, pooled = board.floor.summary, board.pooled.summary
    return {
        "suite": board.suite.name,
        "version": board.suite.spec.version,
        "digest": suite_digest(board.suite),
        "kind": "measured",
        "complete": board.complete,
        "floor": None if floor is None else {**vars(floor), "per_seed": board.floor.per_seed},
        "pooled_floor": None if pooled is None else vars(pooled),
        "rows": [_row(row) for row in board.rows],
        "tuning": _tuning(board),
        "audits": audits_json(board.audits),
        "published": published_json(board.suite.spec.published),
        **({"folds": folds_json(board)} if board.suite.spec.folds else {}),
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
    return {
        "seeds": list(tune.seeds),
        "trials_per_row": tune.trials,
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
