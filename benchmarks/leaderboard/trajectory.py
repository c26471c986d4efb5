"""Metrics over the steps of unlearning, for rows with ``evaluate_every``.

The last step is what a leaderboard reports; a trajectory shows what stopping earlier or later would
have reported instead.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.leaderboard.board import Leaderboard
from benchmarks.pipeline.evaluating import read_scores
from benchmarks.pipeline.stage import Stage
from benchmarks.pipeline.unlearning import TRAJECTORY
from benchmarks.pipeline.worksite import SCALARS
from common.base.registry import BENCHMARKS
from common.protocol.benchmark import Benchmark
from common.store.stages import StageStore
from common.train.tracking import read_scalars

PREFIX = "evaluation/"
Trajectory = Mapping[int, Mapping[str, float]]
"""Steps done -> metric -> value."""
Trajectories = Mapping[str, Mapping[int, Trajectory]]
"""Row label -> seed -> trajectory."""
COLOURS = ("#1f4e9c", "#c0392b", "#1e8449", "#b7950b", "#7d3c98", "#117a65", "#a04000", "#515a5a")
PANEL, GAP, LEFT, TOP = (250, 160), 60, 50, 50


def read_trajectories(board: Leaderboard, store: StageStore) -> dict[str, dict[int, Trajectory]]:
    """What was evaluated in training, with the metrics that need Retrain's scores."""
    targets = {
        record.seed: board.stage(label, record)
        for label, record in board.records
        if record.method == "retrain" and record.replicate == 0
    }
    found: dict[str, dict[int, Trajectory]] = {}
    for label, record in board.records:
        if record.method in ("original", "retrain"):
            continue
        model = board.stage(label, record).parents["model"]
        trajectory = _trajectory(board, store, model, targets.get(record.seed))
        if trajectory:
            found.setdefault(label, {})[record.seed] = trajectory
    return found


def _trajectory(
    board: Leaderboard, store: StageStore, model: Stage, target: Stage | None
) -> dict[int, dict[str, float]]:
    folder = store.folder(model.kind, model.key)
    steps: dict[int, dict[str, float]] = {}
    for row in read_scalars(folder / SCALARS):
        values = {k.removeprefix(PREFIX): v for k, v in row.items() if k.startswith(PREFIX)}
        if values:
            steps[row["step"]] = {k: v for k, v in values.items() if v is not None}
    if steps and target is not None:
        for step, metrics in _compared(board, store, folder, target, list(steps)).items():
            steps[step] |= metrics
    return steps


def _compared(
    board: Leaderboard,
    store: StageStore,
    folder: Path,
    target: Stage,
    steps: list[int],
) -> dict[int, dict[str, float]]:
    benchmark = BENCHMARKS[board.suite.spec.benchmark]
    if benchmark.compare.__func__ is Benchmark.compare.__func__:  # type: ignore[attr-defined]
        return {}
    from common.measure.scores import load_scores

    theirs = read_scores(store, target)
    found: dict[int, dict[str, float]] = {}
    for step in steps:
        path = folder / TRAJECTORY / f"{step:06d}.safetensors"
        if path.is_file():
            metrics = benchmark.compare(board.suite.protocol, load_scores(path), theirs)
            found[step] = {k: v for k, v in metrics.items() if v is not None}
    return found


def to_json(trajectories: Trajectories) -> dict[str, Any]:
    """Row -> seed -> step -> metrics, as plain JSON."""
    return {
        label: {str(seed): {str(step): dict(m) for step, m in t.items()} for seed, t in s.items()}
        for label, s in trajectories.items()
    }


def to_svg(board: Leaderboard, trajectories: Trajectories) -> str:
    """One panel per main column: the mean over seeds by step; Retrain's mean dashed."""
    names = [name for name in board.suite.spec.columns if _known(trajectories, name)]
    width = LEFT + len(names) * (PANEL[0] + GAP)
    height = TOP + PANEL[1] + 50 + 18 * len(trajectories)
    body = [
        _panel(board, trajectories, name, LEFT + i * (PANEL[0] + GAP))
        for i, name in enumerate(names)
    ]
    legend = [
        f'<text x="{LEFT}" y="{TOP + PANEL[1] + 50 + 18 * i}" fill="{COLOURS[i % len(COLOURS)]}">'
        f"{html.escape(label)}</text>"
        for i, label in enumerate(trajectories)
    ]
    title = html.escape(f"{board.suite.name}: metrics over steps (mean of seeds; dashed: Retrain)")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="10" y="20" font-size="14" font-weight="bold">{title}</text>'
        + "".join(body + legend)
        + "</svg>\n"
    )


def _known(trajectories: Trajectories, name: str) -> bool:
    return any(name in m for s in trajectories.values() for t in s.values() for m in t.values())


def mean_line(by_seed: Mapping[int, Trajectory], name: str) -> dict[int, float]:
    """Step -> mean over the seeds, for the steps that every seed has."""
    steps = set.intersection(*(set(trajectory) for trajectory in by_seed.values()))
    line = {}
    for step in sorted(steps):
        values = [trajectory[step].get(name) for trajectory in by_seed.values()]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            line[step] = math.fsum(known) / len(known)
    return line


def _panel(board: Leaderboard, trajectories: Trajectories, name: str, left: int) -> str:
    lines = {label: mean_line(by_seed, name) for label, by_seed in trajectories.items()}
    retrain = next((r.metrics.get(name) for r in board.rows if r.label == "retrain"), None)
    values = [v for line in lines.values() for v in line.values()]
    values += [retrain.mean] if retrain else []
    low, high = min(values), max(values)
    last = max((step for line in lines.values() for step in line), default=1)
    span = (high - low) or 1.0

    def at(step: float, value: float) -> str:
        x = left + PANEL[0] * step / last
        return f"{x:.1f},{TOP + PANEL[1] * (1 - (value - low) / span):.1f}"

    parts = [
        f'<rect x="{left}" y="{TOP}" width="{PANEL[0]}" height="{PANEL[1]}" fill="none" '
        'stroke="#ccc"/>',
        f'<text x="{left}" y="{TOP - 8}">{html.escape(board.specs[name].title)}</text>',
        f'<text x="{left - 4}" y="{TOP + 10}" text-anchor="end" fill="#666">{high:.3g}</text>',
        f'<text x="{left - 4}" y="{TOP + PANEL[1]}" text-anchor="end" fill="#666">{low:.3g}</text>',
        f'<text x="{left + PANEL[0]}" y="{TOP + PANEL[1] + 16}" text-anchor="end" fill="#666">'
        f"step {last}</text>",
    ]
    if retrain:
        ends = " ".join(at(step, retrain.mean) for step in (0, last))
        parts.append(f'<polyline points="{ends}" stroke="#888" stroke-dasharray="4" fill="none"/>')
    for index, line in enumerate(lines.values()):
        points = " ".join(at(step, value) for step, value in line.items())
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{points}" stroke="{colour}" fill="none"/>')
    return "".join(parts)
