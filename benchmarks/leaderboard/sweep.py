"""What reports say of tuning: where the trials came from, all of them, and what was chosen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from benchmarks.report.cells import settings
from benchmarks.report.section import Section, table
from benchmarks.spec.resolve import ResolvedSuite

if TYPE_CHECKING:
    from benchmarks.leaderboard.board import Leaderboard, Trial

SAMPLERS = {
    "grid": "a grid",
    "qmc": "qmc (scrambled Sobol points of Optuna)",
    "random": "random (independent draws of Optuna)",
    "tpe": "tpe (Optuna; the first round is qmc)",
}


def sources(suite: ResolvedSuite) -> list[tuple[str, str, str]]:
    """(rows, sampler, grid or space) of every tuned row; rows that share theirs come together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in suite.rows:
        if row.search is not None:
            rows.setdefault((row.search.sampler, str(row.search)), []).append(row.label)
    return [(", ".join(labels), *source) for source, labels in rows.items()]


def tuning_sections(board: Leaderboard) -> list[Section]:
    """Budget, rule of the choice, where the trials came from, and every trial."""
    tune = board.suite.spec.tune
    assert tune is not None
    budget = (
        f"{tune.trials} trials per row on seed {', '.join(map(str, tune.seeds))}, chosen by "
        "the smallest mean |gap| to Retrain on forget, retain and validation data; test data "
        "was not scored. The chosen config was then frozen for the seeds above."
    )
    lines = [
        f"{rows}: {SAMPLERS[sampler]}, {space}" for rows, sampler, space in sources(board.suite)
    ]
    edges = [f"{row.label} ({', '.join(row.edges)})" for row in board.rows if row.edges]
    if edges:
        lines.append(
            "Chosen at the edge of the grid or within a tenth of the range's end, where a wider "
            f"one may do better: {', '.join(edges)}"
        )
    rows = []
    for trial in board.trials:
        gap = f"{trial.gap:.2f}" if math.isfinite(trial.gap) else "diverged"
        rows.append([trial.label, settings(trial.params), gap, _choice(trial)])
    trials = table(["row", "trial", "validation gap", ""], rows)
    return [
        Section("Tuning", (budget,), lines=tuple(lines), level="full"),
        Section(content=trials, level="full"),
    ]


def _choice(trial: Trial) -> str:
    if not trial.chosen:
        return ""
    return "chosen" + (f" ({', '.join(trial.edges)} at the edge)" if trial.edges else "")
