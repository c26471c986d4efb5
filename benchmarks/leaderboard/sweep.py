"""What reports say of tuning: where the trials came from, all of them, and what was chosen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from benchmarks.spec.resolve import ResolvedSuite

if TYPE_CHECKING:
    from benchmarks.leaderboard.board import Leaderboard, Trial

SAMPLERS = {
    "grid": "a grid",
    "qmc": "qmc (scrambled Sobol points of Optuna)",
    "random": "random (independent draws of Optuna)",
    "tpe": "tpe (Optuna; the first round is qmc)",
}


def short(value: Any) -> str:
    """A parameter's value for tables."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def sources(suite: ResolvedSuite) -> list[tuple[str, str, str]]:
    """(rows, sampler, grid or space) of every tuned row; rows that share theirs come together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in suite.rows:
        if row.search is not None:
            rows.setdefault((row.search.sampler, str(row.search)), []).append(row.label)
    return [(", ".join(labels), *source) for source, labels in rows.items()]


def tuning_text(board: Leaderboard) -> str:
    """Budget and rule of the choice."""
    tune = board.suite.spec.tune
    assert tune is not None
    return (
        f"{tune.trials} trials per row on seed {', '.join(map(str, tune.seeds))}, chosen by "
        "the smallest mean |gap| to Retrain on forget, retain and *validation* data; test data "
        "was not scored. The chosen config was then frozen for the seeds above."
    )


def tuning_lines(board: Leaderboard) -> list[str]:
    """Where the trials came from, and which choices lie at an edge."""
    lines = [
        f"{rows}: {SAMPLERS[sampler]}, {space}" for rows, sampler, space in sources(board.suite)
    ]
    edges = [f"{row.label} ({', '.join(row.edges)})" for row in board.rows if row.edges]
    if edges:
        lines.append(
            "Chosen at the edge of the grid or within a tenth of the range's end, where a wider "
            f"one may do better: {', '.join(edges)}"
        )
    return lines


def tuning_table(board: Leaderboard) -> tuple[list[str], list[list[str]]]:
    """Every trial: heads and rows."""
    rows = []
    for trial in board.trials:
        params = ", ".join(f"{key}={short(value)}" for key, value in trial.params.items())
        gap = f"{trial.gap:.2f}" if math.isfinite(trial.gap) else "diverged"
        rows.append([trial.label, params, gap, _mark(trial)])
    return ["row", "trial", "validation gap", ""], rows


def _mark(trial: Trial) -> str:
    if not trial.chosen:
        return ""
    return "chosen" + (f" ({', '.join(trial.edges)} at the edge)" if trial.edges else "")


def tuning_json(board: Leaderboard) -> dict[str, Any] | None:
    """The whole sweep as plain values; an infinite gap (diverged) is None."""
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
